"""The op of the recipe Softmax of long rows and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# What is small enough for registers, and what the cache holds: the launcher's two decisions.
REGISTERS = (64 * 1024, 2**20)
PLANS = st.sampled_from([REGISTERS, (0, 2**20), (0, 2**16), (0, 0)])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/softmax_long.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/softmax_long.py")


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, int]) -> Iterator[None]:
    """Have the launcher decide as if registers and cache were of other sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "SOFTMAX_LONG_WHOLE", plan[0])
        patch.setattr(taken, "_softmax_long_gpu", lambda device: (4, plan[1]))
        yield


def assert_close(taken: ModuleType, out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert out.device.type == DEVICE.type
    assert out.shape == expected.shape
    assert out.is_contiguous()
    # The exponent is less than 16 and is rounded, which is a relative error of 16 roundings in an exponential and in
    # their sum; the sums have a few dozen additions one after another. What is no normal number there may be zero.
    flushed = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).tiny
    assert_within(out, expected, magnitude, roundings=96, floor=flushed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts(), plan=PLANS)
@example(lead=(5,), N=1000, of_x=Layout("contiguous", 0), plan=REGISTERS)
def test_value(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout, plan: tuple[int, int]
) -> None:
    """The value is right for any length, layout and plan, and its dtype is that of the argument."""
    x = of_x.make((*lead, N), dtype, DEVICE)
    with planned(taken, plan):
        out = guarded(taken.softmax_long, x)
        assert torch.equal(taken.softmax_long(x), out)
    assert out.dtype == dtype
    expected = torch.softmax(x.double(), -1)
    assert_close(taken, out, expected, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_grad=layouts(), of_y=layouts(), plan=PLANS)
@example(lead=(5,), N=1000, of_grad=Layout("contiguous", 0), of_y=Layout("contiguous", 1), plan=REGISTERS)
def test_gradient(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_grad: Layout,
    of_y: Layout,
    plan: tuple[int, int],
) -> None:
    """The backward op is right for any gradient and any y, in any layout."""
    grad = of_grad.make((*lead, N), dtype, DEVICE)
    y = torch.softmax(of_y.make((*lead, N), dtype, DEVICE).double(), -1).to(dtype)
    y = y.T.contiguous().T if of_y.name == "transposed" and y.ndim == 2 else y
    with planned(taken, plan):
        out = guarded(taken.softmax_long_backward, grad, y)
        assert torch.equal(taken.softmax_long_backward(grad, y), out)
    assert out.dtype == dtype
    grad, y = grad.double(), y.double()
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    assert_close(taken, out, expected, y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 300), of_x=layouts(), of_grad=layouts(), plan=PLANS)
def test_autograd(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    of_grad: Layout,
    plan: tuple[int, int],
) -> None:
    """Through autograd a gradient is that of float64, but for the rounding of what the forward saves."""
    x = of_x.make((*lead, N), dtype, DEVICE)
    grad = of_grad.make((*lead, N), dtype, DEVICE)
    wide = x.double().clone().requires_grad_()
    with planned(taken, plan):
        (out,) = torch.autograd.grad(taken.softmax_long(x.requires_grad_()), x, grad)
    y = torch.softmax(wide, -1)
    (expected,) = torch.autograd.grad(y, wide, grad.double())
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2**-18
    small = torch.finfo(dtype).tiny * 8 * (1 + grad.double().abs().sum(-1, keepdim=True))
    terms = y * (grad.double().abs() + (grad.double() * y).abs().sum(-1, keepdim=True))
    assert ((out.double() - expected).abs() <= 4 * unit * terms + small).all()


# Lengths for tiles in registers, and for eight to one program for each multiprocessor of a GPU.
LENGTHS = [*(2**k for k in range(15)), 3, 100, 1000, 3000, 8193, 16384 + 8, 20_001, 32_000, 50_000, 80_000, 150_001]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    rows = 3 if N > 1024 else 2048 // N + 1
    x, grad = (Layout("contiguous", k).make((rows, N + 8), dtype, DEVICE)[:, 8:] for k in range(2))
    y = taken.softmax_long(x)
    expected = torch.softmax(x.double(), -1)
    assert_close(taken, y, expected, expected)
    wide = grad.double()
    out, y = taken.softmax_long_backward(grad, y), y.double()
    expected = y * (wide - (wide * y).sum(-1, keepdim=True))
    assert_close(taken, out, expected, y * (wide.abs() + (wide * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_gradient_of_whole_blocks(taken: ModuleType, dtype: torch.dtype) -> None:
    """Going back from the end of a row, the last block is a full one."""
    with planned(taken, (0, 2**30)):
        x = torch.empty(1, dtype=dtype)
        block = taken._softmax_long_plan(x, 3, 1, 1, 2)[1]["BLOCK_N"]
        grad, y = torch.rand(2, 3, 2 * block, dtype=dtype, device=DEVICE)
        out = taken.softmax_long_backward(grad, y)
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(M=st.integers(1, 5), N=sizes(64, 300), seed=st.integers(0, 2**31), plan=PLANS)
def test_padded_rows(taken: ModuleType, dtype: torch.dtype, M: int, N: int, seed: int, plan: tuple[int, int]) -> None:
    """Rows of any length that begin at multiples of 16 bytes: what pads them is no part of them."""
    x = Layout("contiguous", seed).make((M, N + 32 - N % 16), dtype, DEVICE)[:, :N]
    expected = torch.softmax(x.double(), -1)
    with planned(taken, plan):
        assert_close(taken, guarded(taken.softmax_long, x), expected, expected)


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: rows that fit, and programs whose rows the cache holds."""
    fits = taken._softmax_long_fits
    assert all(fits(N, N, 4, 4) == (N <= 2048 or N % 4 == 0) for N in range(1, 16385, 61))
    assert [fits(N, N, 2, 4) for N in (8192, 8200)] == [True, False]
    assert [fits(N, N, 2, 2) for N in (16384, 16392)] == [True, False]
    assert [fits(N, N, 8, 8) for N in (8192, 8194)] == [True, False]
    assert [fits(4096, stride, 2, 4) for stride in (4096, 4104, 4100)] == [True, True, False]
    for dtype in FLOATS:
        x, wide = torch.empty(1, dtype=dtype), max(4, dtype.itemsize)
        for N in range(1, 64 * 1024 // wide, 61):
            (programs,), plan = taken._softmax_long_whole_plan(x, 1000, N, N)
            assert plan["BLOCK_N"] // 2 < N <= plan["BLOCK_N"]
            assert (programs - 1) * plan["BLOCK_M"] < 1000 <= programs * plan["BLOCK_M"]
            tile = plan["BLOCK_M"] * plan["BLOCK_N"] * wide
            assert tile == max(8 * 1024, plan["BLOCK_N"] * wide)
            assert plan["num_warps"] == max(4, tile // (32 * 128)) <= 16
    assert taken._softmax_long_whole_plan(torch.empty(1).half(), 1000, 16384, 16384)[1]["num_warps"] == 16
    # Rows are loaded 16 bytes at a time, if those of the output begin alike.
    x = torch.empty(1, dtype=torch.bfloat16)
    vectors = [taken._softmax_long_plan(x, 2, 20_001, stride, 1)[1]["VEC"] for stride in (20_001, 20_009, 20_002)]
    assert vectors == [8, 8, 1]
    x = torch.empty(1)
    with planned(taken, (0, 2**20)):
        for N, tensors, rows in ((1000, 1, 8), (10_000, 1, 2), (10_000, 2, 1), (80_000, 1, 1)):
            grid, plan = taken._softmax_long_plan(x, 10**6, N, N, tensors)
            assert (grid, plan["num_warps"]) == ((10**6,), 32 // rows)
            assert rows == 1 or 4 * rows * N * 4 * tensors <= 0.7 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x, grad = (Layout("contiguous", k).make((3, 3001), dtype, DEVICE) for k in range(2))
    for plan in (REGISTERS, (0, 2**20)):
        with planned(taken, plan):
            y = taken.softmax_long(x)
            assert torch.equal(at_cuda(taken.softmax_long, x), y)
            d = taken.softmax_long_backward(grad, y)
            assert torch.equal(at_cuda(taken.softmax_long_backward, grad, y), d)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 3000, 20_001):
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.randn(3, N, generator=generator).to(recipe.DEVICE) for _ in range(2))
        expected = torch.softmax(x.double(), -1).float()
        parts = {name: part for name, (*part, longest) in recipe.PARTS.items() if longest >= N}
        forward = [recipe.online, recipe.columns]
        forward += [partial(recipe.run, *part) for name, part in parts.items() if "back" not in name]
        for step in forward:
            y = torch.full_like(x, torch.nan)
            step(x, y)
            torch.testing.assert_close(y, expected)
        expected = y * (g - (g * y).sum(-1, keepdim=True))
        for part in (part for name, part in parts.items() if "back" in name):
            d = torch.full_like(x, torch.nan)
            recipe.run(*part, g, y, d)
            torch.testing.assert_close(d, expected)
    y = torch.full_like(x, torch.nan)
    recipe.run(*recipe.PARTS["two passes"][:3], x, y, num_warps=8, BLOCK_N=512)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    assert recipe.statements(recipe.online_kernel) == 15


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=DEVICE)
    with Guard() as guard:
        outputs = taken.softmax_long(x), taken.softmax_long_backward(x, x)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


@pytest.mark.parametrize("limit", [64 * 1024, 0])
def test_gradcheck(taken: ModuleType, limit: int) -> None:
    """Differences agree with the gradient, in registers and in two passes."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, DEVICE).requires_grad_()
    with planned(taken, (limit, 2**20)):
        assert torch.autograd.gradcheck(taken.softmax_long, x)


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    x = Layout("contiguous", 0).make((3, 7), torch.float64, DEVICE).requires_grad_()
    (d,) = torch.autograd.grad(taken.softmax_long(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


@pytest.mark.parametrize("N", [9000, 9001])
@pytest.mark.parametrize("limit", [64 * 1024, 0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype, limit: int, N: int) -> None:
    """NaN, infinities and the lowest and highest numbers do what they do in PyTorch, and to no other row."""
    large = torch.finfo(dtype).max
    x = torch.zeros(12, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :8000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9], x[10, 0] = -large, -large, large, large
    with planned(taken, (limit, 2**20)):
        for part in (x, x[:, :5], x[:, 4000:]):
            torch.testing.assert_close(taken.softmax_long(part), torch.softmax(part, -1), equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    for N in (5000, 40_000):
        x = torch.zeros(2, N, dtype=dtype, device=DEVICE)
        expected = torch.full_like(x, 1 / N)
        rtol = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
        torch.testing.assert_close(taken.softmax_long(x), expected, rtol=rtol, atol=6e-8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_growing_maximum(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each block has a new maximum, and the sum so far follows; or none has, and nothing changes."""
    rising = torch.linspace(-6, 6, 40_000, dtype=torch.float64, device=DEVICE).to(dtype)
    for row in (rising, rising.flip(0), rising.roll(20_000)):
        expected = torch.softmax(row.double(), -1)
        assert_close(taken, taken.softmax_long(row), expected, expected)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=DEVICE)
    ops = {"softmax_long": taken.softmax_long, "softmax_long_backward": lambda x: taken.softmax_long_backward(x, x)}
    for name, op in ops.items():
        with pytest.raises(TypeError, match=rf"^{name} takes a float tensor, not torch\.int32"):
            op(x.int())
        with pytest.raises(ValueError, match=rf"^{name} takes .* up to 2\*\*30 elements"):
            op(x[0, 0].expand(2**30 + 1))
    with pytest.raises(ValueError, match=r"^softmax_long_backward takes .*, not .*\(3,\).* for .*\(2, 3\)"):
        taken.softmax_long_backward(x[0], x)
    with pytest.raises(ValueError, match=r"torch\.float64.*torch\.float32"):
        taken.softmax_long_backward(x.double(), x)


@pytest.mark.needs_gpu_memory(15)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (33, 2**26)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, with short rows and with long ones."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, ::2] = 1
    y = taken.softmax_long(x)
    torch.testing.assert_close(y[-1], torch.softmax(x[-1], -1))
    assert (y[:-1] == y[0, 0]).all()
    d = taken.softmax_long_backward(x, y)
    torch.testing.assert_close(d[-1], taken.softmax_long_backward(x[-1].clone(), y[-1].clone()))
    assert not d[:-1].any()
    del d, y
    view = x[:, : N // 2 - 3]
    torch.testing.assert_close(taken.softmax_long(view)[-1], torch.softmax(view[-1], -1))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 40_000])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Both ops pass the whole of opcheck, with each kernel."""
    x, grad = (torch.randn(7, N, device=DEVICE).to(dtype) for _ in range(2))
    for op, inputs in ((taken.softmax_long, (x.requires_grad_(),)), (taken.softmax_long_backward, (grad, grad))):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: taken.softmax_long(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 40_000)):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        y, expected = compiled(x), torch.softmax(x * 2, -1)
        torch.testing.assert_close(y, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    x = torch.randn(5, 100, device="cuda:1", requires_grad=True)
    y = taken.softmax_long(x)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    (d,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(d, torch.zeros_like(d))


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, N: int, stride: int) -> list[tuple[object, dict[str, object]]]:
    """Return both kernels of long rows, each with what is known of its arguments at a launch."""
    x, of = torch.empty(1, dtype=dtype), NAMES[str(dtype).removeprefix("torch.")]
    kernels = taken._softmax_long_kernel, taken._softmax_long_backward_kernel
    plans = [taken._softmax_long_plan(x, 1000, N, stride, tensors)[1] for tensors in (1, 2)]
    return [(kernel, {"dtype": of, **plan}) for kernel, plan in zip(kernels, plans, strict=True)]


def widths(taken: ModuleType) -> list[list[set[str]]]:
    """Return, for odd rows that begin alike and others, how wide the loads and stores of both kernels are."""
    return [
        [
            set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16|b32)\s", ptx(kernel, **known)))
            for kernel, known in launches(taken, torch.bfloat16, 50_257, stride)
        ]
        for stride in (50_257, 50_264)
    ]


def exponentials(taken: ModuleType) -> list[set[str]]:
    """Return the exponentials of both dtypes' forward."""
    kernels = [launches(taken, dtype, 50_000, 50_000)[0] for dtype in (torch.bfloat16, torch.float64)]
    return [set(re.findall(r"ex2\S*", ptx(kernel, **known))) for kernel, known in kernels]


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill, with every plan for long rows."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for cache in (2**30, 5 * 2**20, 2 * 2**20, 2**10):
            for stride in (100_001, 100_008):
                with planned(taken, (0, cache)):
                    (_, plan), *_ = known = launches(taken, dtype, 100_001, stride)
                name = f"{dtype} {plan['num_warps']} {plan['VEC']}"
                found[name] = [stack(kernel, **options) for kernel, options in known]
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Bodies are loaded 16 bytes at a time; tl.exp2 keeps nothing below the normal numbers; float64 stays float64."""
    found, single = on_h100(gallery / "fusion" / "softmax_long.py", widths, exponentials)
    alike, others = found
    assert alike == [{"v4.b32", "b16"}] * 2
    assert others[0] == {"b16"}
    assert single == [{"ex2.approx.ftz.f32"}, set()]


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of rows that stay in registers, and of long ones."""
    return [graphs(recipe.softmax_long, torch.randn(3, N, requires_grad=True)) for N in (300, 20_001)]


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Neither input counts as written, either way: a store's address must not depend on them."""
    (found,) = on_h100(gallery / "fusion" / "softmax_long.py", traced)
    for graph in (graph for both in found for graph in both):
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"]
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]
        assert graph.count("<built-in function getitem>") == 1


@pytest.mark.thorough
def test_registers_hardly_spill(gallery: Path, on_h100: Ask) -> None:
    """With any number of programs, aligned or not."""
    (found,) = on_h100(gallery / "fusion" / "softmax_long.py", spills)
    assert {name.split()[1] for name in found} >= {"4", "16", "32"}
    assert {name.split()[2] for name in found} == {"1", "2", "4", "8"}
    assert {name: bytes_ for name, bytes_ in found.items() if max(bytes_) > 16} == {}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/softmax_long")
    twice, error, first, second = out.splitlines()
    assert twice == "x is read 2 times, y is written once"
    assert re.fullmatch(r"largest relative error \d\.\de-07, allowed 5\.0e-06", error)
    assert first.endswith("20000 NaN")
    assert second.endswith(" 0 NaN")


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("softmax_long", lambda normal, M, N: (normal(M, N),), lambda x: torch.softmax(x, -1)),
    ("softmax_long", lambda normal, M, N: (normal(M // 50, 50 * N),), lambda x: torch.softmax(x, -1)),
    (
        "softmax_long_backward",
        lambda normal, M, N: (normal(M // 50, 50 * N), normal(M // 50, 50 * N)),
        lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("short rows stored without a mask", "offs_m * N + offs_n, y, mask=mask)", "offs_m * N + offs_n, y)"),
    (
        "short rows behind the last",
        "    # Rows past the last one are the last one again.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "",
    ),
    (
        "a short row padded with zeros",
        'tl.load(x_ptrs, mask=mask, other=-float("inf"))',
        "tl.load(x_ptrs, mask=mask, other=0)",
    ),
    ("rows taken for adjacent", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    ("long rows taken for adjacent", "x_ptr, row * stride_xm, N, VEC", "x_ptr, row * N, N, VEC"),
    ("a sum that is not corrected", "        s *= _softmax_long_exp(m - larger)\n", ""),
    (
        "a last block that is empty",
        "    last = (N - 1) // BLOCK_N * BLOCK_N\n",
        "    last = N // BLOCK_N * BLOCK_N\n",
    ),
    ("edges that are left out of the sum", "    total += tl.sum(e, axis=0)\n", ""),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("a body where rows do not begin alike", '"VEC": 16 // size if alike else 1', '"VEC": 16 // size'),
    (
        "vectors across rows",
        '"VEC": math.gcd(N, stride, 16 // size)',
        '"VEC": math.gcd(stride, 16 // size)',
    ),
    ("gradient stored without a mask", "tl.store(d_body + offs, d, mask=mask,", "tl.store(d_body + offs, d,"),
    (
        "gradient of short rows stored without a mask",
        "tl.store(d_ptr + offs, d, mask=mask)",
        "tl.store(d_ptr + offs, d)",
    ),
    (
        "no launcher for GPUs",
        'SOFTMAX_LONG_LIBRARY.impl("softmax_long", _softmax_long_launch, "CUDA")\n',
        "",
    ),
    (
        "no launcher of the gradient for GPUs",
        'SOFTMAX_LONG_LIBRARY.impl(\n    "softmax_long_backward", _softmax_long_backward_launch, "CUDA"\n)\n',
        "",
    ),
]
