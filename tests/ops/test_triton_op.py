"""The ops of the recipe A kernel as an op, their gradients, and what the page says of ops."""

import re
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, shapes
from tolerance import assert_within
from torch.autograd.gradcheck import GradcheckError

from triton_gallery.compiling import compile_only

BLOCK = 1024  # of the recipe
MOST = 8 * BLOCK


def assert_close(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.shape == expected.shape
    # A sine is off by at most two units in the last place, which are four roundings.
    assert_within(out, expected, expected.abs(), roundings=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, MOST), layout=layouts())
def test_value(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: Layout) -> None:
    """The value is right in any layout, and its dtype is that of the argument."""
    x = layout.make(shape, dtype, recipe.DEVICE)
    out = guarded(recipe.sine, x)
    assert out.dtype == dtype
    assert torch.equal(recipe.sine(x), out)
    assert torch.equal(torch.ops.triton_gallery.sine(x), out)
    assert_close(recipe, out, x.double().sin())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(shape=shapes(BLOCK, MOST), layout=st.tuples(layouts(), layouts()))
def test_gradient(
    recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: tuple[Layout, Layout]
) -> None:
    """The gradient is right in any layout, that of the incoming gradient too."""
    grad, x = (each.make(shape, dtype, recipe.DEVICE) for each in layout)
    out = guarded(recipe.sine_backward, grad, x)
    assert out.dtype == dtype
    assert_close(recipe, out, grad.double() * x.double().cos())
    x.requires_grad_()
    assert torch.equal(*torch.autograd.grad(recipe.sine(x), x, grad), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=10)
@given(shape=shapes(16, 40), seed=st.integers(0, 2**31))
def test_second_derivatives(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    """A loss with gradients in it has the gradient that it has in PyTorch."""
    torch.manual_seed(seed)
    values, w, a = torch.randn((3, *shape), dtype=dtype, device=recipe.DEVICE)

    def second(op: Callable[..., torch.Tensor], wide: torch.dtype) -> torch.Tensor:
        x = values.to(wide).requires_grad_()
        (dx,) = torch.autograd.grad((op(x) * w.to(wide)).sum(), x, create_graph=True)
        (dx,) = torch.autograd.grad((a.to(wide) * dx).sum() + (dx * dx).sum(), x)
        return dx.double()

    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        second(recipe.sine, dtype), second(torch.sin, torch.float64), rtol=tolerance, atol=tolerance
    )


def test_guards_reach_into_the_op(recipe: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=recipe.DEVICE)
    with Guard() as guard:
        outputs = recipe.sine(x), recipe.sine_backward(x, x)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


def test_gradcheck(recipe: ModuleType) -> None:
    """Both ops pass gradcheck and gradgradcheck, and so does the Function."""
    x, grad = (recipe.random(2, 3, dtype=torch.float64) for _ in range(2))
    for op, inputs in ((recipe.sine, (x,)), (recipe.sine_backward, (grad, x)), (recipe.Sine.apply, (x,))):
        assert torch.autograd.gradcheck(op, inputs)
        assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("name", ["backward_in_torch", "bare", "wrapped"])
def test_other_backwards(recipe: ModuleType, name: str) -> None:
    """Each passes gradcheck; gradgradcheck finds those that launch without an op."""
    x = recipe.random(2, 3, dtype=torch.float64)
    recipe.sine.register_autograd(getattr(recipe, name), setup_context=recipe.save)
    try:
        assert torch.autograd.gradcheck(recipe.sine, x)
        if name == "backward_in_torch":
            assert torch.autograd.gradgradcheck(recipe.sine, x)
        else:
            with pytest.raises(GradcheckError):
                torch.autograd.gradgradcheck(recipe.sine, x)
    finally:
        recipe.sine.register_autograd(recipe.backward, setup_context=recipe.save)


@given(shape=shapes(BLOCK, 3 * BLOCK), dtype=st.sampled_from(FLOATS))
def test_in_place(recipe: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The op with an underscore changes its argument, tells autograd so, and returns nothing."""
    x = Layout("offset", 0).make(shape, dtype, recipe.DEVICE)
    expected, version = recipe.sine(x), x._version
    assert recipe.sine_answer_(x) is None
    assert torch.equal(x, expected)
    assert x._version > version


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for op in (recipe.sine, recipe.sine_answer_, lambda x: recipe.sine_backward(x, x)):
        with pytest.raises(TypeError, match=r"not torch\.int32"):
            op(x.int())
    for other in (x[0], x.double(), x.to("meta")):
        with pytest.raises(ValueError, match="one dtype, shape and device"):
            recipe.sine_backward(x, other)
    for wrong in (x.T, x.clone().requires_grad_()):
        with pytest.raises(ValueError, match="takes a contiguous x, and has no backward"):
            recipe.sine_answer_(wrong)


def test_sine_of_16_bits_needs_a_conversion(recipe: ModuleType) -> None:
    """tl.sin takes float32 and float64, as the kernel's comment says."""
    x = torch.ones(5, dtype=torch.float16, device=recipe.DEVICE)
    with pytest.raises(Exception, match="Expected dtype"):
        recipe.sine_kernel[(1,)](x, x, 5, recipe.tl.float16, 16)


def test_address(recipe: ModuleType) -> None:
    """A kernel gets the address of the tensor that the op was given, of a view too."""
    x = torch.ones(8, device=recipe.DEVICE)
    for view in (x, x[2:], x[::2]):
        assert recipe.address(view).item() == view.data_ptr()


def test_exercise(recipe: ModuleType) -> None:
    """The check accepts the answer, and no op whose value or gradient is wrong."""
    assert recipe.check_cosine(recipe.cosine_answer) == "right"
    assert recipe.check_cosine(torch.cos) == "right"
    assert recipe.check_cosine(recipe.sine) == "wrong"
    assert recipe.check_cosine(lambda x: x.detach().cos() + 0 * x) == "wrong"
    assert recipe.check_in_place(recipe.sine_answer_) == "right"
    assert recipe.check_in_place(torch.sin_) == "right"
    assert recipe.check_in_place(torch.cos_) == recipe.check_in_place(torch.sin) == "not solved yet"


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


@compile_only
def kernels_found(source: str) -> dict[str, int]:
    """Return how many kernels PyTorch finds in each op of this page's text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.py")
        file.write_text(source.replace("raise RuntimeError", "RuntimeError"))  # it asks for a GPU or the interpreter
        page = runpy.run_path(str(file))
        ops = {name: op._qualname for name, op in page.items() if hasattr(op, "_qualname")}
        return {name: len(torch._library.triton.get_triton_kernels_for_op(op)) for name, op in ops.items()}


def test_kernels_are_in_the_key(gallery: Path) -> None:
    """PyTorch finds the kernel of each op, so torch.compile's cache on disk notices an edit of it."""
    found = kernels_found((gallery / "pytorch/triton_op.py").read_text())
    assert found.keys() >= {"sine", "sine_answer_", "sine_backward"}
    del found["returns_argument"]
    assert set(found.values()) == {1}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    text = printed("pytorch/triton_op")
    assert max(map(len, text.splitlines())) <= 80
    joined = re.sub(r"\s+", " ", text)
    for part in (
        "function Function op",
        "gradient RuntimeError right right",
        "gradient penalty RuntimeError right right",
        "fake tensors launches launches (5, 7)",
        "kernels in torch.compile 1 1 1",
        "torch.export RuntimeError RuntimeError sine.default",
        "triton_gallery::sine(Tensor x) -> Tensor",
        "sin.approx in the PTX: False",
        "__cudart_i2opi_f in the PTX: True",
        "RuntimeError: Trying to backward through triton_gallery.sine_backward.default but no autograd formula",
        "bare launch wrap_triton op",
        "gradient right right right",
        "gradient penalty wrong wrong right",
        "fake tensors launches (5, 7) (5, 7)",
        "kernels in torch.compile BackendCompilerFailed 2 2",
        "torch.export sine.default sine.default sine.default",
        "the same address: True",
        "ValueError: takes tensors of one dtype, shape and device",
        "('test_schema', 'SUCCESS') ('test_autograd_registration', 'SUCCESS')",
        "The output of this custom operator (1) must not also be an input",
        "test_schema failed with Argument x is not defined as mutable but was",
        "triton_gallery::sine_(Tensor(a0!) x) -> ()",
        "RuntimeError: Cannot register autograd formula for non-functional operator",
        "cosine: not solved yet",
        "sine_: not solved yet",
    ):
        assert part in joined


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("sine", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a gradient stored without a mask", "grad * tl.cos(x), mask=mask)", "grad * tl.cos(x))"),
    ("a cosine without its gradient", "grad * tl.cos(x), mask=mask)", "tl.cos(x), mask=mask)"),
    ("half a second gradient", "-g * grad * sine(x)", "-g * sine(x)"),
]
