"""The op of the recipe Softmax and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, ptx
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes
from tolerance import assert_within
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded run shows it")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# What is small enough for registers, and what the cache holds: the launcher's two decisions.
PLANS = st.sampled_from([(64 * 1024, 2**20), (0, 2**20), (0, 2**16), (0, 0)])


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/softmax.py")


@contextmanager
def planned(recipe: ModuleType, plan: tuple[int, int]) -> Iterator[None]:
    """Have the launcher decide as if registers and cache were of other sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "IN_REGISTERS", plan[0])
        patch.setattr(recipe, "CACHE", plan[1])
        yield


def assert_close(recipe: ModuleType, out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.shape == expected.shape
    assert out.is_contiguous()
    # The exponent is less than 16 and is rounded, which is a relative error of 16 roundings in an exponential and in
    # their sum; the sums have a few dozen additions one after another. What is no normal number there may be zero.
    flushed = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).tiny
    assert_within(out, expected, magnitude, roundings=96, floor=flushed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts(), plan=PLANS)
def test_value(
    recipe: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout, plan: tuple[int, int]
) -> None:
    """The value is right for any length, layout and plan, and its dtype is that of the argument."""
    x = of_x.make((*lead, N), dtype, recipe.DEVICE)
    with planned(recipe, plan):
        out = guarded(recipe.softmax, x)
        assert torch.equal(recipe.softmax(x), out)
    assert out.dtype == dtype
    expected = torch.softmax(x.double(), -1)
    assert_close(recipe, out, expected, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_grad=layouts(), of_y=layouts(), plan=PLANS)
def test_gradient(
    recipe: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_grad: Layout,
    of_y: Layout,
    plan: tuple[int, int],
) -> None:
    """The backward op is right for any gradient and any y, in any layout."""
    grad = of_grad.make((*lead, N), dtype, recipe.DEVICE)
    y = torch.softmax(of_y.make((*lead, N), dtype, recipe.DEVICE).double(), -1).to(dtype)
    y = y.T.contiguous().T if of_y.name == "transposed" and y.ndim == 2 else y
    with planned(recipe, plan):
        out = guarded(recipe.softmax_backward, grad, y)
        assert torch.equal(recipe.softmax_backward(grad, y), out)
    assert out.dtype == dtype
    grad, y = grad.double(), y.double()
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    assert_close(recipe, out, expected, y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 300), of_x=layouts(), of_grad=layouts(), plan=PLANS)
def test_autograd(
    recipe: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    of_grad: Layout,
    plan: tuple[int, int],
) -> None:
    """Through autograd a gradient is that of float64, but for the rounding of what the forward saves."""
    x = of_x.make((*lead, N), dtype, recipe.DEVICE)
    grad = of_grad.make((*lead, N), dtype, recipe.DEVICE)
    wide = x.double().requires_grad_()
    with planned(recipe, plan):
        (out,) = torch.autograd.grad(recipe.softmax(x.requires_grad_()), x, grad)
    y = torch.softmax(wide, -1)
    (expected,) = torch.autograd.grad(y, wide, grad.double())
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2**-18
    small = torch.finfo(dtype).tiny * 8 * (1 + grad.double().abs().sum(-1, keepdim=True))
    terms = y * (grad.double().abs() + (grad.double() * y).abs().sum(-1, keepdim=True))
    assert ((out.double() - expected).abs() <= 4 * unit * terms + small).all()


# A length for every tile in registers, and lengths for eight to one program for each multiprocessor of a GPU.
LENGTHS = [*(2**k for k in range(15)), 3, 100, 3000, 8193, 16384 + 8, 20_001, 50_000, 80_000, 150_001]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    rows = 3 if N > 1024 else 2048 // N + 1
    x, grad = (Layout("contiguous", k).make((rows, N + 8), dtype, recipe.DEVICE)[:, 8:] for k in range(2))
    y = recipe.softmax(x)
    expected = torch.softmax(x.double(), -1)
    assert_close(recipe, y, expected, expected)
    wide = grad.double()
    out, y = recipe.softmax_backward(grad, y), y.double()
    expected = y * (wide - (wide * y).sum(-1, keepdim=True))
    assert_close(recipe, out, expected, y * (wide.abs() + (wide * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_gradient_of_whole_blocks(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Going back from the end of a row, the last block is a full one."""
    with planned(recipe, (0, recipe.PROCESSORS * 2**18)):
        block = recipe.plan(3, 1, 1, dtype.itemsize, 2)[2]["BLOCK_N"]
        grad, y = torch.rand(2, 3, 2 * block, dtype=dtype, device=recipe.DEVICE)
        out = recipe.softmax_backward(grad, y)
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


def test_plans(recipe: ModuleType) -> None:
    """The launcher asks for what it says: rows that fit, programs whose rows the cache holds, no more than rows."""
    for N in range(1, 16385, 61):
        for tensors, warps in ((1, 8), (2, 16)):
            (programs,), _, options = recipe.plan(1000, N, N, 4, tensors)
            assert ("BLOCK_M" in options) == (N <= recipe.FEW or N % 4 == 0)
            assert options["num_warps"] <= (warps if "BLOCK_M" in options else 32)
            if "BLOCK_M" in options:
                assert options["BLOCK_N"] >= N
                assert programs * options["BLOCK_M"] >= 1000
    assert "BLOCK_M" not in recipe.plan(2, 16388, 16388, 4, 1)[2]
    assert "BLOCK_M" not in recipe.plan(2, 8194, 8194, 8, 1)[2]
    # Odd rows are loaded 16 bytes at a time, if those of the output are aligned alike.
    assert [recipe.plan(2, 20_001, stride, 2, 1)[1] for stride in (20_001, 20_009, 20_002)] == [8, 8, 1]
    with planned(recipe, (0, recipe.PROCESSORS * 2**18)):
        for N, each in ((1000, 8), (10_000, 2), (80_000, 1)):
            assert recipe.plan(10**6, N, N, 4, 1)[0] == (each * recipe.PROCESSORS,)
        assert recipe.plan(3, 1000, 1000, 4, 2)[0] == (3,)


def test_guards_reach_into_the_op(recipe: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=recipe.DEVICE)
    with Guard() as guard:
        outputs = recipe.softmax(x), recipe.softmax_backward(x, x)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


@pytest.mark.parametrize("limit", [64 * 1024, 0])
def test_gradcheck(recipe: ModuleType, limit: int) -> None:
    """Differences agree with the gradient, in registers and in the cache."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, recipe.DEVICE).requires_grad_()
    with planned(recipe, (limit, 2**20)):
        assert torch.autograd.gradcheck(recipe.softmax, x)


def test_gradient_has_no_gradient(recipe: ModuleType) -> None:
    """A second derivative is refused, not zero; and the first answer has the right formula for it."""
    x = Layout("contiguous", 0).make((3, 7), torch.float64, recipe.DEVICE).requires_grad_()
    (d,) = torch.autograd.grad(recipe.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()
    g, y, v = (t.double().requires_grad_() for t in torch.rand(3, 4, 9))
    by_g, by_y = torch.autograd.grad(y * (g - (g * y).sum(-1, keepdim=True)), (g, y), v)
    torch.testing.assert_close(by_g, y * (v - (v * y).sum(-1, keepdim=True)))
    formula = v * (g - (g * y).sum(-1, keepdim=True)) - g * (v * y).sum(-1, keepdim=True)
    torch.testing.assert_close(by_y, formula)


@pytest.mark.parametrize("N", [9000, 9001])
@pytest.mark.parametrize("limit", [64 * 1024, 0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype, limit: int, N: int) -> None:
    """NaN, infinities and the lowest and highest numbers do what they do in PyTorch, and to no other row."""
    large = torch.finfo(dtype).max
    x = torch.zeros(12, N, dtype=dtype, device=recipe.DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :8000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9], x[10, 0] = -large, -large, large, large
    with planned(recipe, (limit, 2**20)):
        for part in (x, x[:, :5], x[:, 4000:]):
            torch.testing.assert_close(recipe.softmax(part), torch.softmax(part, -1), equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    for N in (5000, 40_000):
        x = torch.zeros(2, N, dtype=dtype, device=recipe.DEVICE)
        expected = torch.full_like(x, 1 / N)
        rtol = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
        torch.testing.assert_close(recipe.softmax(x), expected, rtol=rtol, atol=6e-8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, and the sum so far follows; or none has, and nothing changes."""
    rising = torch.linspace(-6, 6, 40_000, dtype=torch.float64, device=recipe.DEVICE).to(dtype)
    for row in (rising, rising.flip(0), rising.roll(20_000)):
        expected = torch.softmax(row.double(), -1)
        assert_close(recipe, recipe.softmax(row), expected, expected)


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for op in (recipe.softmax, lambda x: recipe.softmax_backward(x, x)):
        with pytest.raises(TypeError, match=r"not torch\.int32"):
            op(x.int())
        with pytest.raises(ValueError, match="up to 2\\*\\*30 elements"):
            op(x[0, 0].expand(2**30 + 1))
    with pytest.raises(ValueError, match=r"one dtype, shape and device, not .*\(2, 3\).*\(3,\)"):
        recipe.softmax_backward(x, x[0])
    with pytest.raises(ValueError, match=r"torch\.float32.*torch\.float64"):
        recipe.softmax_backward(x, x.double())


@pytest.mark.needs_gpu_memory(15)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (33, 2**26)])
def test_beyond_int32(recipe: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, with short rows and with long ones."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=recipe.DEVICE)
    x[-1, ::2] = 1
    y = recipe.softmax(x)
    torch.testing.assert_close(y[-1], torch.softmax(x[-1], -1))
    assert (y[:-1] == y[0, 0]).all()
    d = recipe.softmax_backward(x, y)
    torch.testing.assert_close(d[-1], recipe.softmax_backward(x[-1].clone(), y[-1].clone()))
    assert not d[:-1].any()
    del d, y
    view = x[:, : N // 2 - 3]
    torch.testing.assert_close(recipe.softmax(view)[-1], torch.softmax(view[-1], -1))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 20_000])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Both ops pass the whole of opcheck, with each kernel."""
    x, grad = (torch.randn(7, N, device=recipe.DEVICE).to(dtype) for _ in range(2))
    for op, inputs in ((recipe.softmax, (x.requires_grad_(),)), (recipe.softmax_backward, (grad, grad))):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: recipe.softmax(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 20_000)):
        x = torch.randn(shape, device=recipe.DEVICE, requires_grad=True)
        y, expected = compiled(x), torch.softmax(x * 2, -1)
        torch.testing.assert_close(y, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b)


def test_traffic(recipe: ModuleType) -> None:
    """PyTorch's operators read and write as often as the page says."""
    x, moved = torch.ones(64, 4096), []

    class Traffic(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            moved.append(round(sum(t.numel() for t in (*args, out) if isinstance(t, torch.Tensor)) / x.numel()))
            return out

    with Traffic():
        recipe.softmax_torch(x)
    assert moved == [1, 2, 2, 1, 2]


def codes(recipe: ModuleType) -> dict[str, list[str]]:
    """Return the PTX of kernels of the page."""
    tl, exp = recipe.tl, recipe.exp

    @recipe.triton.jit
    def plain_exp_kernel(x_ptr):
        tl.store(x_ptr, tl.exp(tl.load(x_ptr)))

    @recipe.triton.jit
    def exp_kernel(x_ptr):
        tl.store(x_ptr, exp(tl.load(x_ptr)))

    rows, long = {"BLOCK_N": 1024, "BLOCK_M": 2}, {"BLOCK_N": 1024, "LOWEST": -3e38}
    back = {"BLOCK_N": 1024, "BLOCK_M": 1, "UNIT": 1, "WHOLE": False}
    return {
        "exp": [ptx(kernel, "fp32") for kernel in (plain_exp_kernel, exp_kernel)],
        "rows": [ptx(recipe.softmax_kernel, "bf16", ACC=tl.float32, VEC=vec, **rows) for vec in (8, 1)],
        "long": [ptx(recipe.softmax_long_kernel, "bf16", ACC=tl.float32, VEC=vec, **long) for vec in (8, 1)],
        "back": [ptx(recipe.softmax_backward_kernel, "bf16", ACC=tl.float32, VEC=vec, **back) for vec in (8, 1)],
        "float64": [ptx(recipe.softmax_kernel, "fp64", ACC=tl.float64, VEC=2, **rows)],
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """tl.exp2 drops what tl.exp keeps, float64 stays float64, and VEC decides how wide a load is, of any row."""
    (found,) = on_h100(gallery / "fusion" / "softmax.py", codes)
    assert [re.findall(r"ex2\S*", text) for text in found["exp"]] == [["ex2.approx.f32"], ["ex2.approx.ftz.f32"]]
    for name, edges in (("rows", set()), ("long", {"b16"}), ("back", {"b16"})):
        loads = [set(re.findall(r"ld\.global\S*?\.(v4\.b32|b16|b32)\s", text)) for text in found[name]]
        assert loads == [{"v4.b32"} | edges, {"b16"}]
    assert "ex2" not in found["float64"][0]


@pytest.mark.thorough
@without_a_gpu
def test_page(gallery: Path, tmp_path: Path) -> None:
    """What the page prints without a GPU is what its text says."""
    command = [sys.executable, gallery.resolve() / "fusion" / "softmax.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    first, second = run.stdout.splitlines()
    assert first.endswith("20000 NaN")
    assert second.endswith(" 0 NaN")
    assert run.stderr == ""


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("softmax", lambda normal, M, N: (normal(M, N),)),
    ("softmax_backward", lambda normal, M, N: (normal(M, N), normal(M, N))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("softmax stored without half a mask", "y, (offs_m < M) & (offs_n < N))", "y, offs_n < N)"),
    ("a row padded with zeros", "x_rows + offs_n, offs_n < N, HIDDEN)", "x_rows + offs_n, offs_n < N, 0)"),
    ("a sum that is not corrected", "            s *= exp(m - larger)\n", ""),
    (
        "rows taken for adjacent",
        "tl.minimum(offs_m, M - 1) * stride_vecs * VEC",
        "tl.minimum(offs_m, M - 1) * N_vecs * VEC",
    ),
    (
        "a last block that is empty",
        "            last = (N - 1) // BLOCK_N * BLOCK_N\n",
        "            last = N // BLOCK_N * BLOCK_N\n",
    ),
    ("edges that are left out of the sum", "axis=0) + tl.sum(e, axis=0))", "axis=0))"),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("vectors across rows", "VEC = math.gcd(N, stride, 16 // size)", "VEC = math.gcd(stride, 16 // size)"),
]
