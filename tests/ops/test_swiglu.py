"""The ops of the recipe SwiGLU, their gradients, and what the page says of traffic."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, shapes
from tolerance import assert_within

BLOCK = 1024  # of the recipe
MOST = 2 * BLOCK + 1  # elements: the interpreter takes milliseconds for a tile
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/swiglu.py")


def reference(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return value, gradients and magnitudes of these in float64, for a gradient, gate and up."""
    grad, gate, up = (t.detach().double() for t in tensors)
    s = torch.sigmoid(gate)
    dgate, dup = grad * up * s * (1 + gate * (1 - s)), grad * gate * s
    # What is added up in dgate may cancel; the error is that of the terms.
    terms = (grad * up * s).abs() * (1 + gate.abs() * (1 - s))
    return [gate * s * up, dgate, dup, (gate * s * up).abs(), terms, dup.abs()]


def assert_close(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.shape == expected.shape
    # exp's argument is rounded, which is a relative error of 2 |x| < 16 roundings, and there are eight more operations.
    assert_within(out, expected, magnitude, roundings=32)


def assert_right(recipe: ModuleType, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *got: object) -> None:
    """Assert value and gradients."""
    expected = reference(grad, gate, up)
    for out, exact, magnitude in zip(got, expected[:3], expected[3:], strict=True):
        assert out.dtype == gate.dtype
        assert_close(recipe, out, exact, magnitude)


def projection(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with twice the elements in each row."""
    return layout.make((*shape[:-1], 2 * shape[-1]), dtype, device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=10)
@given(shape=shapes(BLOCK, MOST), of=st.tuples(layouts(), layouts(), layouts()))
def test_value_and_gradients(
    recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of: tuple[Layout, Layout, Layout]
) -> None:
    """Value and gradients are right in any layout, that of the incoming gradient too."""
    grad, gate, up = (layout.make(shape, dtype, recipe.DEVICE) for layout in of)
    out = guarded(recipe.swiglu, gate, up)
    gradients = guarded(recipe.swiglu_backward, grad, gate, up)
    assert_right(recipe, grad, gate, up, out, *gradients)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=10)
@given(shape=shapes(BLOCK, MOST).filter(len), of_grad=layouts(), of_x=layouts())
def test_packed(recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_grad: Layout, of_x: Layout) -> None:
    """The op on a whole projection writes the whole of its gradient."""
    grad, x = of_grad.make(shape, dtype, recipe.DEVICE), projection(of_x, shape, dtype, recipe.DEVICE)
    out = guarded(recipe.swiglu_packed, x)
    dx = guarded(recipe.swiglu_packed_backward, grad, x)
    assert dx.is_contiguous()
    assert_right(recipe, grad, *recipe.halves(x), out, *recipe.halves(dx))


@pytest.mark.parametrize("columns", [1, 3, 8, 31, 40, 129, 1000, 1024, 1025])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=2)
def test_halves(recipe: ModuleType, columns: int, seed: int) -> None:
    """Halves of a projection give what contiguous tensors give, to the last bit, and so do rows of any distance."""
    x = projection(Layout("contiguous", seed), (5, columns), torch.float32, recipe.DEVICE)
    grad = Layout("contiguous", seed + 1).make((5, columns), torch.float32, recipe.DEVICE)
    apart, whole = recipe.halves(x), [half.contiguous() for half in recipe.halves(x)]
    views = [recipe.rows(half) for half in apart]
    assert [view.data_ptr() for view in views] == [half.data_ptr() for half in apart], "copied"
    for op, arguments in ((recipe.swiglu, ()), (recipe.swiglu_backward, (grad,))):
        outs = [op(*arguments, *pair) for pair in (apart, whole, (apart[0], whole[1]))]
        for other in outs[1:]:
            torch.testing.assert_close(outs[0], other, rtol=0, atol=0)
    one_row = x[:1, :columns].expand(5, -1), whole[1]
    assert torch.equal(recipe.swiglu(*one_row), recipe.swiglu(one_row[0].contiguous(), whole[1]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_through_autograd(recipe: ModuleType, dtype: torch.dtype) -> None:
    """What autograd returns are the gradients of the ops that are tested above, for expanded gradients too."""
    x = projection(Layout("contiguous", 0), (3, 20), dtype, recipe.DEVICE).requires_grad_()
    gate, up = (half.detach().clone().requires_grad_() for half in recipe.halves(x))
    ones = torch.ones_like(gate)
    dgate, dup = torch.autograd.grad(recipe.swiglu(gate, up).sum(), (gate, up))
    assert_right(recipe, ones, gate, up, recipe.swiglu(gate, up), dgate, dup)
    for op in (recipe.swiglu_packed, partial(recipe.split, recipe.swiglu)):
        (dx,) = torch.autograd.grad(op(x).sum(), x)
        assert torch.equal(dx, torch.cat([dgate, dup], -1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values(recipe: ModuleType) -> None:
    """Large numbers don't overflow on the way, and NaN and infinities come out as from PyTorch."""
    special = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -89.0, -104.0, torch.inf, -torch.inf, torch.nan])
    gate, up = (t.flatten().to(recipe.DEVICE) for t in torch.meshgrid(special, special, indexing="ij"))
    torch.testing.assert_close(recipe.swiglu(gate, up), recipe.swiglu_torch(gate, up), equal_nan=True)
    finite = gate.isfinite() & up.isfinite()
    pair = [t[finite].requires_grad_() for t in (gate, up)]
    got = torch.autograd.grad(recipe.swiglu(*pair).sum(), pair)
    expected = torch.autograd.grad(recipe.swiglu_torch(*pair).sum(), pair)
    torch.testing.assert_close(got, expected)


def test_gradcheck(recipe: ModuleType) -> None:
    """Both ops pass gradcheck; a second derivative is refused, not wrong."""
    new = partial(recipe.normal, dtype=torch.float64)
    gate, up, x = new(2, 3), new(2, 3), new(2, 6)
    assert torch.autograd.gradcheck(recipe.swiglu, (gate, up))
    assert torch.autograd.gradcheck(partial(recipe.split, recipe.swiglu), x)
    assert torch.autograd.gradcheck(recipe.swiglu_packed, x)
    for op, inputs in ((recipe.swiglu, (gate, up)), (recipe.swiglu_packed, (x,))):
        gradients = torch.autograd.grad(op(*inputs).sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            gradients[0].sum().backward()


def test_guards_reach_into_the_ops(recipe: ModuleType) -> None:
    """What the ops allocate lies between guards in the tests above."""
    x = torch.ones(3, 10, device=recipe.DEVICE)
    grad = torch.ones(3, 5, device=recipe.DEVICE)
    for op, inputs in (
        (recipe.swiglu, recipe.halves(x)),
        (recipe.swiglu_backward, (grad, *recipe.halves(x))),
        (recipe.swiglu_packed, (x,)),
        (recipe.swiglu_packed_backward, (grad, x)),
    ):
        with Guard() as guard:
            out = op(*inputs)
        guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
        assert out.untyped_storage().data_ptr() in guards


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 4, device=recipe.DEVICE)
    for op in (
        recipe.swiglu,
        lambda x, y: recipe.swiglu_backward(x, x, y),
        lambda x, y: recipe.swiglu_backward(y, x, x),
        lambda x, y: recipe.swiglu_packed_backward(y, torch.cat([x, x], -1)),
    ):
        with pytest.raises(TypeError, match=r"not torch\.int32"):
            op(x.int(), x.int())
        with pytest.raises(ValueError, match=r"one dtype, shape and device, not .*\(2, 4\)"):
            op(x, x[0])
        with pytest.raises(ValueError, match=r"torch\.float(32|64).*torch\.float(64|32)"):
            op(x, x.double())
        with pytest.raises(ValueError, match="meta"):
            op(x, x.to("meta"))
    with pytest.raises(TypeError, match=r"not torch\.complex64"):
        recipe.swiglu_packed(x.to(torch.complex64))
    for odd in (x[:, :3], x[0, 0]):
        with pytest.raises(ValueError, match="even last dimension"):
            recipe.swiglu_packed(odd)


def test_traffic(recipe: ModuleType) -> None:
    """What the page counts: PyTorch's own five and nine, and each way from a projection to the output."""
    counts = {name: recipe.count(way, recipe.normal(4, 16)) for name, way in recipe.WAYS.items()}
    assert counts == {
        "PyTorch": [5, 13, 3],
        "copies": [7, 9, 2],
        "slices": [3, 17, 2],
        "chunks": [3, 9, 2],
        "packed": [3, 5, 2],
    }
    assert recipe.count(recipe.swiglu_torch, recipe.normal(6), recipe.normal(6)) == [5, 9, 3]
    assert recipe.count(lambda x: x.exp().view(-1), recipe.normal(2, 3)) == [2, 3, 1]


def test_keeping_is_the_same_function(recipe: ModuleType) -> None:
    """The functions that are timed for keeping the sigmoid compute what the ops compute."""
    grad, gate, up = (recipe.normal(3, 5, dtype=torch.float64).detach() for _ in range(3))
    out, s = recipe.keep(gate, up)
    torch.testing.assert_close(out, recipe.swiglu(gate, up))
    gradients = torch.stack(recipe.keep_backward(grad, gate, up, s))
    torch.testing.assert_close(gradients, recipe.swiglu_backward(grad, gate, up))


def test_gradients_over_the_inputs(recipe: ModuleType) -> None:
    """A launch that writes over gate corrupts what others kept, without an error, until PyTorch is told."""

    class Overwriting(torch.autograd.Function):
        tell = False

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, *pair: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*pair)
            return recipe.swiglu(*pair)

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pair = ctx.saved_tensors
            gradients = recipe.swiglu_backward(grad, *pair)
            recipe.launch(recipe.swiglu_kernel, pair, pair[0])  # whatever it is that is written there
            if Overwriting.tell:
                torch.autograd.graph.increment_version(pair[0])
            return gradients.unbind()

    def gradient(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = torch.tensor([0.0, 0.5, 1.0], device=recipe.DEVICE, requires_grad=True)
        return torch.autograd.grad(op(x.exp(), torch.ones_like(x)).sum(), x)[0]

    assert not torch.allclose(gradient(Overwriting.apply), gradient(recipe.swiglu))
    Overwriting.tell = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(Overwriting.apply)


def accesses(recipe: ModuleType) -> dict[tuple[str, str, int], Counter[str]]:
    """Return how often kernels load and store, by their name, the dtype and the unit."""
    kernels, float32 = {"forward": recipe.swiglu_kernel, "backward": recipe.swiglu_backward_kernel}, recipe.tl.float32
    for name in ("M", "N"):
        one = {name: 1, "UNIT": 1, "BLOCK_M": 32, "BLOCK_N": 32}
        ptx(kernels["backward"], "fp64", ACC=recipe.tl.float64, **one)
    return {
        (name, dtype, unit): Counter(
            re.findall(r"(?:ld|st)\.global\S*", ptx(kernel, dtype, ACC=float32, UNIT=unit, BLOCK_M=2, BLOCK_N=512))
        )
        for name, kernel in kernels.items()
        for dtype in ("bf16", "fp32")
        for unit in (8, 1)
    }


def launches(recipe: ModuleType) -> list[int]:
    """Return how many launches the graphs of the ops have, for sizes that units divide and that they do not."""
    made = []
    for op, inputs, columns in ((recipe.swiglu, 2, 48), (recipe.swiglu, 2, 47), (recipe.swiglu_packed, 1, 96)):
        made += graphs(op, *(torch.randn(33, columns, requires_grad=True) for _ in range(inputs)))
    return [sum("triton_kernel" in name for name in graph) for graph in made]


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Units of eight make accesses of 16 bytes; sizes of 1 compile; the ops can be traced with symbolic sizes."""
    found, seen = on_h100(gallery / "fusion" / "swiglu.py", accesses, launches)
    wide = {"ld.global.v4.b32": 2, "st.global.v4.b32": 1}
    assert found["forward", "bf16", 8] == wide
    assert found["forward", "fp32", 8] == {name: 2 * n for name, n in wide.items()}
    assert found["forward", "bf16", 1] == {"ld.global.b16": 16, "st.global.b16": 8}
    assert found["backward", "bf16", 8] == {"ld.global.v4.b32": 3, "st.global.v4.b32": 2}
    assert found["backward", "bf16", 1] == {"ld.global.b16": 24, "st.global.b16": 16}
    assert seen == [1] * 6  # forward and backward


@pytest.mark.needs_gpu_memory(34)
@pytest.mark.parametrize("columns", [2**14, 2999])
def test_beyond_int32(recipe: ModuleType, columns: int) -> None:
    """The last elements of more than 2**31 are right, in one long row and in rows that lie apart."""
    rows = 2**31 // columns + 3
    x = torch.zeros(rows, 2 * columns, dtype=torch.bfloat16, device=recipe.DEVICE)
    grad = torch.zeros(rows, columns, dtype=torch.bfloat16, device=recipe.DEVICE)
    corner = torch.tensor([2.0, 3.0, 5.0], dtype=torch.bfloat16, device=recipe.DEVICE)
    grad[-1, -1], x[-1, columns - 1], x[-1, -1] = corner
    expected = [value.bfloat16() for value in reference(*corner)[:3]]
    out, dx = recipe.swiglu_packed(x), recipe.swiglu_packed_backward(grad, x)
    got = torch.stack([out[-1, -1], dx[-1, columns - 1], dx[-1, -1]])
    assert torch.equal(got, torch.stack(expected))
    dx[-1, columns - 1] = dx[-1, -1] = 0
    assert not dx.any()
    del dx
    gate, up = (half.contiguous() for half in recipe.halves(x))
    assert torch.equal(recipe.swiglu(gate, up), out)
    out[-1, -1] = 0
    assert not out.any()
    del x, out
    both = recipe.swiglu_backward(grad, gate, up)
    assert torch.equal(both[:, -1, -1], torch.stack(expected[1:]))
    both[:, -1, -1] = 0
    assert not both.any()


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [5, 48])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, columns: int) -> None:
    """All four ops pass the whole of opcheck."""
    gate, up, x = (recipe.normal(7, n * columns, dtype=dtype) for n in (1, 1, 2))
    half = [half.detach().requires_grad_() for half in recipe.halves(x.detach())]
    grad = torch.randn_like(gate)
    for op, inputs in (
        (recipe.swiglu, (gate, up)),
        (recipe.swiglu, half),
        (recipe.swiglu_packed, (x,)),
        (recipe.swiglu_backward, (grad, gate.detach(), up.detach())),
        (recipe.swiglu_packed_backward, (grad, x.detach())),
    ):
        assert set(torch.library.opcheck(op, tuple(inputs)).values()) == {"SUCCESS"}


@gpu
def test_nothing_is_copied_under_torch_compile(recipe: ModuleType) -> None:
    """Compiled, the ops are their launches: Inductor has no kernels of its own to copy what a launch writes to."""
    gate, up, x = (recipe.normal(64, n * 1024) for n in (1, 1, 2))
    for op, inputs in ((recipe.swiglu, (gate, up)), (recipe.swiglu_packed, (x,))):
        torch.compiler.reset()
        compiled = torch.compile(lambda *inputs, op=op: op(*inputs), fullgraph=True, dynamic=False)

        def run(compiled: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
            out = compiled(*inputs)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        _, codes = torch._inductor.utils.run_and_get_code(run, compiled, inputs)
        assert len(codes) == 2
        for code in codes:
            assert "swiglu" in code
            assert "triton_poi" not in code
            assert "copy_" not in code


@gpu
@pytest.mark.parametrize("shape", [(31, 48), (31, 47)])
def test_under_torch_compile(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """The ops give the same bits compiled, alone and between other operators."""
    gate, up, grad = (recipe.normal(*shape) for _ in range(3))
    x = torch.cat([gate, up], -1).detach().requires_grad_()
    for op, inputs in ((recipe.swiglu, (gate, up)), (recipe.swiglu_packed, (x,))):
        compiled = torch.compile(lambda *inputs, op=op: op(*[2 * t for t in inputs]) * 2, fullgraph=True)
        out, expected = compiled(*inputs), op(*[2 * t for t in inputs]) * 2
        assert torch.equal(out, expected)
        for a, b in zip(*(torch.autograd.grad(y, inputs, grad.detach()) for y in (out, expected)), strict=True):
            assert torch.equal(a, b)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("swiglu", lambda normal, M, N: (normal(M, N), normal(M, N))),
    ("swiglu_backward", lambda normal, M, N: (normal(M, N), normal(M, N), normal(M, N))),
    ("swiglu_packed", lambda normal, M, N: (normal(M, 2 * N),)),
    ("swiglu_packed_backward", lambda normal, M, N: (normal(M, N), normal(M, 2 * N))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "swiglu stored without a mask",
        "tl.store(out_ptr + offs_m * stride_out + offs_n, out, mask)",
        "tl.store(out_ptr + offs_m * stride_out + offs_n, out)",
    ),
    ("a row too many", "(offs_m < M) &", "(offs_m < M + 1) &"),
    ("a wrong derivative", "s * (1 + gate * (1 - s))  # (BLOCK_M", "s * (1 - gate * (1 - s))  # (BLOCK_M"),
    ("units that do not divide", "unit if all(n % unit == 0 for n in sizes) else 1", "unit if N % 2 == 0 else 1"),
    ("a copy left out", "return x if x.stride(1) == 1 else x.contiguous()", "return x"),
]
