"""The op of the recipe Softmax and its gradient."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/softmax.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/softmax.py")


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the op takes."""
    return 64 * 1024 // max(4, dtype.itemsize)


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
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts())
def test_value(taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout) -> None:
    """The value is right for any length and layout, and its dtype is that of the argument."""
    x = of_x.make((*lead, N), dtype, DEVICE)
    out = guarded(taken.softmax, x)
    assert torch.equal(taken.softmax(x), out)
    assert out.dtype == dtype
    expected = torch.softmax(x.double(), -1)
    assert_close(taken, out, expected, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_grad=layouts(), of_y=layouts())
def test_gradient(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_grad: Layout, of_y: Layout
) -> None:
    """The backward op is right for any gradient and any y, in any layout."""
    grad = of_grad.make((*lead, N), dtype, DEVICE)
    y = torch.softmax(of_y.make((*lead, N), dtype, DEVICE).double(), -1).to(dtype)
    y = y.T.contiguous().T if of_y.name == "transposed" and y.ndim == 2 else y
    out = guarded(taken.softmax_backward, grad, y)
    assert torch.equal(taken.softmax_backward(grad, y), out)
    assert out.dtype == dtype
    grad, y = grad.double(), y.double()
    expected = y * (grad - (grad * y).sum(-1, keepdim=True))
    assert_close(taken, out, expected, y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 300), of_x=layouts(), of_grad=layouts())
def test_autograd(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout, of_grad: Layout
) -> None:
    """Through autograd a gradient is that of float64, but for the rounding of what the forward saves."""
    x = of_x.make((*lead, N), dtype, DEVICE)
    grad = of_grad.make((*lead, N), dtype, DEVICE)
    wide = x.double().clone().requires_grad_()
    (out,) = torch.autograd.grad(taken.softmax(x.requires_grad_()), x, grad)
    y = torch.softmax(wide, -1)
    (expected,) = torch.autograd.grad(y, wide, grad.double())
    unit = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2**-18
    small = torch.finfo(dtype).tiny * 8 * (1 + grad.double().abs().sum(-1, keepdim=True))
    terms = y * (grad.double().abs() + (grad.double() * y).abs().sum(-1, keepdim=True))
    assert ((out.double() - expected).abs() <= 4 * unit * terms + small).all()


# A length for every tile, those beside them, and one that 8 divides and 16 does not.
LENGTHS = [*(2**k for k in range(15)), 3, 100, 1000, 2049, 3000, 8191]
# Two blocks: the second has one element, is full or partly so; and where the row is too long for two, and is one block.
LENGTHS += [2560, 3073, 4097, 5000, 5120, 6144, 6145, 8193, 10000, 12288, 12289]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    if longest(dtype) < N:
        pytest.skip("a longer row than the op takes")
    rows = 3 if N > 1024 else 2048 // N + 1
    x, grad = (Layout("contiguous", k).make((rows, N + 8), dtype, DEVICE)[:, 8:] for k in range(2))
    y = guarded(taken.softmax, x)
    expected = torch.softmax(x.double(), -1)
    assert_close(taken, y, expected, expected)
    wide = grad.double()
    out, y = guarded(taken.softmax_backward, grad, y), y.double()
    expected = y * (wide - (wide * y).sum(-1, keepdim=True))
    assert_close(taken, out, expected, y * (wide.abs() + (wide * y).abs().sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(M=st.integers(1, 5), N=sizes(64, 300), seed=st.integers(0, 2**31))
def test_padded_rows(taken: ModuleType, dtype: torch.dtype, M: int, N: int, seed: int) -> None:
    """Rows of any length that begin at multiples of 16 bytes: what pads them is no part of them."""
    x = Layout("contiguous", seed).make((M, N + 32 - N % 16), dtype, DEVICE)[:, :N]
    expected = torch.softmax(x.double(), -1)
    assert_close(taken, guarded(taken.softmax, x), expected, expected)


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: tiles of 8 KB, one block or two, so many bytes to a thread."""
    for dtype in FLOATS:
        wide = max(4, dtype.itemsize)
        for N in (*range(1, longest(dtype), 61), longest(dtype)):
            plan = taken._softmax_plan(N, 3 * N, dtype)
            other = taken._softmax_plan(N, 3 * N, dtype, backward=True)
            whole = (1 << (N - 1).bit_length()) * wide // (32 * 128)
            block, rest = plan["BLOCK_N"], plan["REST"]
            tile, least = 8 * 1024, 4
            if 32 * plan["VEC"] < block <= 4 * 1024 // wide and plan["VEC"] * dtype.itemsize < 16:
                tile, least = 4 * 1024, 1 if block * wide <= 1024 else 2  # or all warps would share each row
            assert other == plan | {"num_warps": max(least, whole)}
            if rest:
                assert 2 * block * wide > 16 * 1024
                assert block < N <= block + rest
                assert rest // 2 < N - block
                assert rest <= block // 2
            else:
                assert block // 2 < N <= block
                assert block * wide <= 16 * 1024 or 3 * block < 4 * N
            assert plan["BLOCK_M"] * block * wide == max(tile, block * wide)
            held = plan["BLOCK_M"] * (block + rest) * wide / (32 * plan["num_warps"])
            assert held * 2**0.5 > 128 or plan["num_warps"] == least
            assert held < 128 * 2**0.5
            assert plan["num_warps"] in (1, 2, 4, 8, 16)
            assert N % plan["VEC"] == 0
            assert plan["VEC"] * dtype.itemsize <= 16
    found = {4096: (4096, 0, 4), 4097: (4096, 1, 4), 5120: (4096, 1024, 4), 6144: (4096, 2048, 8)}
    found |= {6145: (8192, 0, 8), 7168: (8192, 0, 8), 10000: (8192, 2048, 8), 12288: (8192, 4096, 16)}
    for N, blocks in (found | {12289: (16384, 0, 16), 16384: (16384, 0, 16), 1000: (1024, 0, 4)}).items():
        plan = taken._softmax_plan(N, N, torch.bfloat16)
        assert (plan["BLOCK_N"], plan["REST"], plan["num_warps"]) == blocks
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1), (1000, 0, 8)):
        assert taken._softmax_plan(N, stride, torch.bfloat16)["VEC"] == vec
    assert taken._softmax_plan(1000, 1000, torch.float32)["VEC"] == 4


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x, grad = (Layout("contiguous", k).make((3, 70), dtype, DEVICE) for k in range(2))
    y = taken.softmax(x)
    assert torch.equal(at_cuda(taken.softmax, x), y)
    assert torch.equal(at_cuda(taken.softmax_backward, grad, y), taken.softmax_backward(grad, y))


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 3000, 5000):
        x = torch.randn(9, N, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE)
        expected = torch.softmax(x.double(), -1).float()
        for step in recipe.FORWARD.values():
            y = torch.full_like(x, torch.nan)
            step(x, y)
            torch.testing.assert_close(y, expected)
        y = torch.full_like(x, torch.nan)
        recipe.loop_kernel[(4,)](x, y, *x.shape, BLOCK_N=8192)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(recipe.softmax_rows(x), expected)
        for step in recipe.BACKWARD.values():
            step(x, y)
    assert recipe.one_block(5000) == {"BLOCK_M": 1, "BLOCK_N": 8192, "REST": 0, "num_warps": 8}
    assert recipe.one_block(197) == {"BLOCK_M": 8, "BLOCK_N": 256, "REST": 0, "num_warps": 4}
    assert [recipe.by_bytes(N) for N in (256, 1024, 4096, 16384)] == [1, 1, 4, 16]
    kernels = (recipe.row_kernel, recipe._softmax_kernel, recipe._softmax_backward_kernel)
    assert [recipe.statements(kernel) for kernel in kernels] == [8, 23, 20]


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=DEVICE)
    with Guard() as guard:
        outputs = taken.softmax(x), taken.softmax_backward(x, x)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradient."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, DEVICE).requires_grad_()
    assert torch.autograd.gradcheck(taken.softmax, x)


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero; and the second answer has the right formula for it."""
    x = Layout("contiguous", 0).make((3, 7), torch.float64, DEVICE).requires_grad_()
    (d,) = torch.autograd.grad(taken.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()
    g, y, v = (t.double().requires_grad_() for t in torch.rand(3, 4, 9))
    by_g, by_y = torch.autograd.grad(y * (g - (g * y).sum(-1, keepdim=True)), (g, y), v)
    torch.testing.assert_close(by_g, y * (v - (v * y).sum(-1, keepdim=True)))
    formula = v * (g - (g * y).sum(-1, keepdim=True)) - g * (v * y).sum(-1, keepdim=True)
    torch.testing.assert_close(by_y, formula)


def test_gradient_of_log_softmax() -> None:
    """The first answer has the right formula."""
    x, g = (t.double().requires_grad_() for t in torch.rand(2, 4, 9))
    y = torch.log_softmax(x, -1)
    (d,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(d, g - y.exp() * g.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN, infinities and the lowest and highest numbers do what they do in PyTorch, and to no other row."""
    large, N = torch.finfo(dtype).max, 8001
    x = torch.zeros(12, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :7000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9], x[10, 0] = -large, -large, large, large
    for part in (x, x[:, :5], x[:, 4000:], x[:, :1000], x[:, :5001], x[:, 3000:]):
        torch.testing.assert_close(taken.softmax(part), torch.softmax(part, -1), equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    x = torch.zeros(2, 5000, dtype=dtype, device=DEVICE)
    expected = torch.full_like(x, 1 / 5000)
    rtol = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(taken.softmax(x), expected, rtol=rtol, atol=6e-8)
    y = torch.full_like(x, 1 / 4096)
    expected = y.double() * (1 - 5000 / 4096)
    torch.testing.assert_close(taken.softmax_backward(x + 1, y), expected.to(dtype), rtol=rtol, atol=6e-8)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=DEVICE)
    for op in (taken.softmax, lambda x: taken.softmax_backward(x, x)):
        with pytest.raises(TypeError, match=r"^softmax takes a float tensor, not torch\.int32"):
            op(x.int())
        for dtype in FLOATS:
            most = longest(dtype)
            row = x[0, 0].to(dtype)
            with pytest.raises(ValueError, match=rf"^softmax takes .* {most} .*{dtype}, not {most + 1}: softmax_long"):
                op(row.expand(most + 1))
    with pytest.raises(ValueError, match=r"^softmax_backward takes .*, not .*\(3,\).* for .*\(2, 3\)"):
        taken.softmax_backward(x[0], x)
    with pytest.raises(ValueError, match=r"torch\.float64.*torch\.float32"):
        taken.softmax_backward(x.double(), x)


@pytest.mark.needs_gpu_memory(15)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last row is right."""
    rows, N = 2**17 + 1, 2**14
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, ::2] = 1
    y = taken.softmax(x)
    torch.testing.assert_close(y[-1], torch.softmax(x[-1], -1))
    assert (y[:-1] == y[0, 0]).all()
    d = taken.softmax_backward(x, y)
    torch.testing.assert_close(d[-1], taken.softmax_backward(x[-1].clone(), y[-1].clone()))
    assert not d[:-1].any()
    del d, y
    view = x[:, : N // 2 - 3]
    torch.testing.assert_close(taken.softmax(view)[-1], torch.softmax(view[-1], -1))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [5, 8000])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Both ops pass the whole of opcheck."""
    x, grad = (torch.randn(7, N, device=DEVICE).to(dtype) for _ in range(2))
    for op, inputs in ((taken.softmax, (x.requires_grad_(),)), (taken.softmax_backward, (grad, grad))):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: taken.softmax(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 16_000)):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        y, expected = compiled(x), torch.softmax(x * 2, -1)
        torch.testing.assert_close(y, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    x = torch.randn(5, 100, device="cuda:1", requires_grad=True)
    y = taken.softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    (d,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(d, torch.zeros_like(d))


def test_traffic(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's operators read and write as often as the page says."""
    x = torch.ones(64, 4096)
    with recipe.Traffic() as traffic:
        recipe.softmax_torch(x)
    assert round(traffic.moved / x.nbytes, 1) == 8
    found = re.findall(r"aten\.(\w+).* reads +([\d,]+), writes +([\d,]+)", capsys.readouterr().out)
    moved = {name: tuple(round(int(n.replace(",", "")) / x.nbytes) for n in sizes) for name, *sizes in found}
    assert moved == {"amax": (1, 0), "sub": (1, 1), "exp": (1, 1), "sum": (1, 0), "div": (1, 1)}


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, N: int, dtype: torch.dtype) -> list[tuple[object, dict[str, object]]]:
    """Return both kernels, each with what is known of its arguments at a launch."""
    of = NAMES[str(dtype).removeprefix("torch.")]
    forward, backward = (taken._softmax_plan(N, N, dtype, backward=way) for way in (False, True))
    kernels = (taken._softmax_kernel, forward), (taken._softmax_backward_kernel, backward)
    return [(kernel, {"dtype": of, **plan}) for kernel, plan in kernels]


def codes(taken: ModuleType) -> dict[int, list[set[str]]]:
    """Return, for rows of some lengths, how wide the loads and stores of both kernels are."""
    return {
        N: [
            set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b32|b16|b32)\s", ptx(kernel, **known)))
            for kernel, known in launches(taken, N, torch.bfloat16)
        ]
        for N in (64, 1000, 1004, 1001, 5120, 16384, 16383)
    }


def waits(taken: ModuleType) -> dict[int, list[list[bool]]]:
    """Return whether warps wait for each other in rows of some lengths, as launched and with four warps."""
    found = {}
    for N in (33, 197, 198, 200):
        both = launches(taken, N, torch.bfloat16)
        four = {"num_warps": 4}
        found[N] = [["bar.sync" in ptx(kernel, **known | more) for kernel, known in both] for more in ({}, four)]
    return found


def spills(taken: ModuleType) -> dict[str, list[int]]:
    """Return the bytes that threads spill, for tiles of all sizes, aligned and odd."""
    return {
        f"{dtype} {N}": [stack(kernel, **known) for kernel, known in launches(taken, N, dtype)]
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for most in (64, 2048, 4096, 6144, 8192, 12288, 16384)
        for N in (most, most - 1)
        if longest(dtype) >= most
    }


def exponentials(taken: ModuleType) -> list[int]:
    """Return how many exponentials in single precision there are in float64."""
    kernels = [*launches(taken, 1000, torch.float64), *launches(taken, 5120, torch.float64)]
    return [ptx(kernel, **known).count("ex2") for kernel, known in kernels]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Where 8 divides the length a thread loads and stores 16 bytes at once; float64 stays float64."""
    widths, singles, barriers = on_h100(gallery / "fusion" / "softmax.py", codes, exponentials, waits)
    wide, half, single = {"v4.b32"}, {"v2.b32"}, {"b16"}
    expected = {64: wide, 1000: wide, 1004: half, 1001: single, 16384: wide, 16383: single}
    # Backward 256 threads share the 1024 elements of a second block.
    assert widths == {N: [one, one] for N, one in expected.items()} | {5120: [wide, wide | half]}
    assert singles == [0] * 4
    never, always = [False, False], [True, True]
    assert barriers == {33: [never, always], 197: [never, always], 198: [never, always], 200: [never, never]}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    return graphs(recipe.softmax, torch.randn(4, 300, requires_grad=True))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Neither input counts as written, either way."""
    (found,) = on_h100(gallery / "fusion" / "softmax.py", traced)
    for graph in found:
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"]
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]
        assert graph.count("<built-in function getitem>") == 1


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """At no length, in no dtype, but for two registers of a gradient of the longest rows at odd addresses."""
    (found,) = on_h100(gallery / "fusion" / "softmax.py", spills)
    assert len(found) == 2 * (7 + 7 + 5)
    spilled = {name: bytes_ for name, bytes_ in found.items() if any(bytes_)}
    assert spilled.keys() <= {"torch.bfloat16 16383", "torch.float32 16383"}
    assert all(forward == 0 and backward <= 8 for forward, backward in spilled.values())


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/softmax")
    *_, eight, two, error, long, integers = out.splitlines()
    assert "8.00 times" in eight
    assert two.endswith(": 2.00")
    assert re.fullmatch(r"largest relative error \d\.\de-07, allowed 5\.0e-06", error)
    assert long.startswith("ValueError: softmax takes rows of up to 16384 elements")
    assert integers == "TypeError: softmax takes a float tensor, not torch.int32"


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("softmax", lambda normal, M, N: (normal(M, N),), lambda x: torch.softmax(x, -1)),
    (
        "softmax_backward",
        lambda normal, M, N: (normal(M, N), normal(M, N)),
        lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("softmax stored without a mask", "offs_n, e / total, mask=mask)", "offs_n, e / total)"),
    ("a second block stored without a mask", "rest, e_rest / total, mask=rest < N)", "rest, e_rest / total)"),
    (
        "rows behind the last",
        "    # Rows past the last one are the last one again.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "",
    ),
    ("a row padded with zeros", 'mask, -float("inf"), ACC)', "mask, 0, ACC)"),
    ("a second block padded with zeros", 'rest < N, -float("inf"), ACC)', "rest < N, 0, ACC)"),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=other)", "tl.load(ptrs)"),
    (
        "a maximum of the first block alone",
        "        top = tl.maximum(top, tl.max(x_rest, axis=1, keep_dims=True))\n",
        "        pass\n",
    ),
    (
        "a maximum of the second block alone",
        "tl.maximum(top, tl.max(x_rest, axis=1, keep_dims=True))",
        "tl.max(x_rest)",
    ),
    ("a sum of the first block alone", "        total += tl.sum(e_rest, axis=1, keep_dims=True)\n", ""),
    (
        "a second block that is too short",
        "triton.next_power_of_2(N - BLOCK_N)",
        "triton.next_power_of_2(N - BLOCK_N) // 2",
    ),
    ("rows taken for adjacent", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    ("vectors across rows", "math.gcd(N, stride, 16 // dtype.itemsize)", "math.gcd(stride, 16 // dtype.itemsize)"),
    ("gradient stored without a mask", "d_ptr + offs, d, mask=mask)", "d_ptr + offs, d)"),
    ("a second block of gradient stored without a mask", "rest, d_rest, mask=rest < N)", "rest, d_rest)"),
    ("gradient without products", "tl.sum(g * y, axis=1", "tl.sum(g, axis=1"),
    ("gradient without products of the second block", "tl.sum(g * y) + tl.sum(g_rest * y_rest)", "tl.sum(g * y)"),
    ("gradient without products of the first of two blocks", "tl.sum(g * y) + tl.sum(g_rest", "tl.sum(g_rest"),
    ("a gradient taken for contiguous", "grad, y = grad.contiguous(), y.contiguous()", "y = y.contiguous()"),
    ("gradient of rows behind the last", "    rows = tl.minimum(offs_m, M - 1) * N\n", "    rows = offs_m * N\n"),
    ("no launcher for GPUs", 'SOFTMAX_LIBRARY.impl("softmax", _softmax_launch, "CUDA")\n', ""),
    (
        "no launcher of the gradient for GPUs",
        'SOFTMAX_LIBRARY.impl("softmax_backward", _softmax_backward_launch, "CUDA")\n',
        "",
    ),
]
