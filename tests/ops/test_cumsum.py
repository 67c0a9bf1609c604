"""The op of the recipe Cumulative sum and its gradient, for rows of all lengths, layouts and dtypes."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import TRITON, Ask, ptx, stack
from device_key import at_cuda
from guard import guarded
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
    return load_op("fusion/cumsum.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cumsum.py")


def reverse(x: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row."""
    return torch.cumsum(x.flip(-1), -1).flip(-1) if x.ndim else x


SCAN = {"cumsum": lambda x: torch.cumsum(x, -1), "cumsum_backward": reverse}


def assert_right(taken: ModuleType, name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that a result is as good as a scan of one block, an exact carry, and its dtype."""
    assert out.device.type == DEVICE.type
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert out.is_contiguous()
    wide = x.double()
    expected, magnitude = SCAN[name](wide), SCAN[name](wide.abs())
    # The additions in a block, one behind another: NumPy, in the interpreter, makes no tree of them.
    N = x.shape[-1:].numel()
    depth = 96 if DEVICE.type == "cuda" else 16 + min(N, 4 * taken.CUMSUM_BLOCK)
    # In float64 the carry rounds, too, and so does the reference.
    roundings = 48 + N if out.dtype == torch.float64 else depth
    assert_within(out, expected, magnitude, roundings, floor=torch.finfo(out.dtype).tiny)


@pytest.mark.parametrize("name", SCAN)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts())
def test_value(taken: ModuleType, dtype: torch.dtype, name: str, lead: tuple[int, ...], N: int, of_x: Layout) -> None:
    """Either direction is right for any length and layout, the same each time, and of the dtype of the argument."""
    x, op = of_x.make((*lead, N), dtype, DEVICE), getattr(taken, name)
    out = guarded(op, x)
    assert torch.equal(op(x), out)
    assert_right(taken, name, x, out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [8, 40, 1024, 1025, 2050, 5000])
def test_exact(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Small integers leave nothing to rounding: every sum is exact, in more rows than a program has."""
    rows = 2100 // N + 2
    x = torch.randint(-2, 3, (rows, N + 8), device=DEVICE).to(dtype)[:, 8:]
    x = x * (torch.arange(N, device=DEVICE) % 8 == 3)  # half precision has integers up to 256
    for name in SCAN:
        expected = SCAN[name](x.double())
        assert expected.abs().max() <= 256
        assert torch.equal(getattr(taken, name)(x).double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 900), of_x=layouts(), of_grad=layouts())
def test_autograd(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout, of_grad: Layout
) -> None:
    """Autograd calls the reverse scan, and for its gradient the scan."""
    x = of_x.make((*lead, N), dtype, DEVICE).requires_grad_()
    grad = of_grad.make((*lead, N), dtype, DEVICE).requires_grad_()
    (out,) = torch.autograd.grad(taken.cumsum(x), x, grad, create_graph=True)
    assert torch.equal(out, taken.cumsum_backward(grad))
    (again,) = torch.autograd.grad(out, grad, x)
    assert torch.equal(again, taken.cumsum(x))


# Lengths of each block and their neighbours.
LENGTHS = [*(2**k for k in range(14)), 3, 100, 1023, 1025, 3000, 4097, 8200, 20_001]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a program has, with a gap between them."""
    rows = 3 if N > 1024 else 1024 // N + 1
    x = Layout("contiguous", N).make((rows, N + 8), dtype, DEVICE)[:, 8:]
    for name in SCAN:
        assert_right(taken, name, x, getattr(taken, name)(x))


def test_plans(taken: ModuleType) -> None:
    """A program has a block of 1024 elements, of one row or of several; of few rows it has more."""
    for M in (1, 2047, 2048):
        for N in (1, 60, 64, 1000, 1024, 1025, 3000, 4096, 50257, 128256):
            for dtype in FLOATS:
                plan = taken._cumsum_plan(torch.empty(M, N, dtype=dtype, device="meta"), N, False)
                few = M < 2048 and N > 1024 and N % 8 == 0
                block = min(4096 if few else 1024, 2 ** (N - 1).bit_length())
                assert plan["BLOCK_N"] == block
                assert plan["BLOCK_M"] == max(1, 1024 // block)
                assert plan["num_warps"] == (4 if few else 2)
                assert N % plan["VEC"] == 0
                assert plan["VEC"] * dtype.itemsize <= 16
    x = torch.empty(1, 1000, dtype=torch.bfloat16, device="meta")
    assert [taken._cumsum_plan(x, stride, True)["VEC"] for stride in (1000, 1004, 1001)] == [8, 4, 1]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 2500):
        x = torch.randn(9, N, generator=torch.Generator().manual_seed(N)).to(DEVICE)
        backward = False
        for name, step in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y)
            backward |= name.startswith("backward")
            if not name.startswith("backward"):  # which makes its own
                torch.testing.assert_close(y, reverse(x) if backward else x.cumsum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recipe.cumsum_rows(x), x.cumsum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recipe.cumsum_torch(x)[0], x.cumsum(-1), rtol=1e-4, atol=1e-4)


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradient, and with the gradient's, of both ops."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, DEVICE).requires_grad_()
    for name in SCAN:
        assert torch.autograd.gradcheck(getattr(taken, name), x)
        assert torch.autograd.gradgradcheck(getattr(taken, name), x, fast_mode=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN and infinities do what they do in PyTorch, to their own rows."""
    N = 3000
    x = torch.zeros(8, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 1500], x[3, 7], x[3, 2900] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[4, :], x[5, ::2], x[6, 0], x[6, 2000] = torch.nan, torch.inf, torch.inf, torch.nan
    x[7, ::7] = -0.0
    for part in (x, x[:, :5], x[:, 1024:2900]):
        for name, expected in SCAN.items():
            torch.testing.assert_close(getattr(taken, name)(part), expected(part), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Adding up ones does not stand still at the 2048 or 256 where half precision does."""
    x = torch.ones(2, 9000, dtype=dtype, device=DEVICE)
    counts = torch.arange(1, 9001, device=DEVICE).double()
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(taken.cumsum(x)[1].double(), counts, rtol=rtol, atol=0)
    torch.testing.assert_close(taken.cumsum_backward(x)[1].double(), counts.flip(0), rtol=rtol, atol=0)


def test_carry_accumulator(taken: ModuleType) -> None:
    """The error does not grow along a row: float32 sums of a large number and ones, far behind the large number."""
    x = torch.zeros(200, 1024, device=DEVICE)
    x[0, 0], x[1:, 5] = 2**26, 1  # which float32 cannot add one by one
    out = taken.cumsum(x.view(1, -1)).view(200, 1024)[:, -1]
    torch.testing.assert_close(out.double(), 2**26 + torch.arange(200, device=x.device).double(), rtol=2**-22, atol=0)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=DEVICE)
    for name in SCAN:
        op = getattr(taken, name)
        for dtype in (torch.int32, torch.bool, torch.complex64):
            with pytest.raises(TypeError, match=rf"^{name} takes floating dtypes, not {dtype}"):
                op(x.to(dtype))
        with pytest.raises(ValueError, match=rf"^{name} takes rows of up to {2**30} elements, not {2**30 + 1}"):
            op(x[0, 0].expand(2**30 + 1))


def test_no_dimension(taken: ModuleType) -> None:
    """A number is a row of one."""
    x = torch.tensor(3.0, device=DEVICE)
    for name in SCAN:
        assert torch.equal(getattr(taken, name)(x), x)


def test_launchers_are_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    x = Layout("contiguous", 0).make((3, 40), torch.float32, DEVICE)
    for name in SCAN:
        op = getattr(taken, name)
        assert torch.equal(at_cuda(op, x), op(x))


@pytest.mark.needs_gpu_memory(11)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (2**25 + 1, 2**6)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, :: max(1, N // 128)] = 1
    for name, expected in SCAN.items():
        out = getattr(taken, name)(x)
        assert torch.equal(out[-1], expected(x[-1].float()).bfloat16())
        assert not out[:-1].any()
        del out
    view = x[:, : N // 2 - 3]
    assert torch.equal(taken.cumsum(view)[-1], torch.cumsum(view[-1].float(), -1).bfloat16())


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "N"), [(7, 5), (20, 5000)])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, rows: int, N: int) -> None:
    """Both ops pass the whole of opcheck."""
    x = torch.randn(rows, N, device=DEVICE).to(dtype).requires_grad_()
    for op in (taken.cumsum, taken.cumsum_backward):
        assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: taken.cumsum(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 20_000)):
        x = torch.rand(shape, device=DEVICE, requires_grad=True)
        y, expected = compiled(x), torch.cumsum(x.double() * 2, -1)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
        (d,) = torch.autograd.grad(y.square().sum(), x)
        (expected,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(d, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    x = torch.randn(5, 100, device="cuda:1")
    torch.testing.assert_close(taken.cumsum(x), torch.cumsum(x, -1))


def facts(text: str) -> dict[str, Any]:
    """Return what is looked for in PTX."""
    return {
        "wide": set(re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|b32)", text)),
        "shuffles": text.count("shfl.sync"),
        "barriers": text.count("bar.sync"),
    }


def both_ways(recipe: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Return the facts of the op's kernel and of one with `tl.cumsum` alone, each forward and backward."""
    tl = recipe.tl

    @recipe.triton.jit
    def language_kernel(x_ptr, BLOCK_N: tl.constexpr, REVERSE: tl.constexpr):
        ptrs = x_ptr + tl.arange(0, BLOCK_N)
        tl.store(ptrs, tl.cumsum(tl.load(ptrs), 0, reverse=REVERSE))

    rows = {"ACC": tl.float32, "VEC": 4, "BLOCK_M": 1, "BLOCK_N": 4096, "num_warps": 4}
    heads = rows | {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 2}
    kernels = {
        "rows": (recipe._cumsum_kernel, rows),
        "heads": (recipe._cumsum_kernel, heads),
        "language": (language_kernel, {"BLOCK_N": 1024, "num_warps": 1}),
    }
    return {
        name: [facts(ptx(kernel, "fp32", REVERSE=way, **options)) for way in (False, True)]
        for name, (kernel, options) in kernels.items()
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Backwards costs nothing but where tl.cumsum does it, and loads are wide."""
    (found,) = on_h100(gallery / "fusion" / "cumsum.py", both_ways)
    for name in ("rows", "heads"):
        forward, backward = found[name]
        assert forward == backward
        assert forward["wide"] == {"ld.global.v4.b32", "st.global.v4.b32"}
    forward, backward = (facts["shuffles"] for facts in found["language"])
    assert backward > (2 if TRITON >= (3, 9) else 5) * forward


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for blocks of all sizes."""
    found = {}
    for dtype, of in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64")):
        for N in (16, 64, 256, 4096, 50257, 128256):
            plan = taken._cumsum_plan(torch.empty(1, N, dtype=dtype, device="meta"), N, True)
            found[f"{of} {N}"] = stack(taken._cumsum_kernel, dtype=of, **plan)
    return found


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """There are none."""
    (found,) = on_h100(gallery / "fusion" / "cumsum.py", spills)
    assert len(found) == 18
    assert not any(found.values()), found


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cumsum")
    steps, moved, two, error, _, *lengths, ones, integers, long, _, subtracted, backwards, _, lost, kept = (
        out.splitlines()
    )
    assert steps == "[1, 3, 6, 10, 15, 21, 28, 36]"
    assert "57.0 times" in moved
    assert two.endswith(": 2.0")
    assert re.fullmatch(r"largest relative error \d\.\de-0\d, allowed 6\.0e-05", error)
    assert len(lengths) == 2
    lost_ones, kept_ones = map(float, re.findall(r"(\d+\.\d)[,\]]", ones))
    assert lost_ones == 0
    assert abs(kept_ones - 2**14) <= 512
    assert integers.startswith("TypeError: cumsum takes floating dtypes")
    assert long.startswith("ValueError: cumsum takes rows of up to")
    assert subtracted.endswith(" 0.0, 0.0, 0.0]")
    assert backwards.endswith(" 6.0, 3.0, 1.0]")
    assert lost.count("nan") == 4
    assert kept.endswith("[inf, 6.0, 3.0, 1.0]")


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("cumsum", lambda normal, M, N: (normal(M, N),), SCAN["cumsum"]),
    ("cumsum_backward", lambda normal, M, N: (normal(M, N),), SCAN["cumsum_backward"]),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sums stored without a mask",
        "tl.store(y_rows + offs, y, mask=mask)",
        "tl.store(y_rows + offs, y)",
    ),
    ("rows behind the last", "mask = (offs_m < M) & (", "mask = (offs_m < M + 1) & ("),
    ("rows taken for adjacent", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    (
        "a carry that forgets",
        "carry += tl.sum(x, axis=1, keep_dims=True)",
        "carry = carry * 0 + tl.sum(x, axis=1, keep_dims=True)",
    ),
    (
        "a carry rounded to float32",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float64)",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float32)",
    ),
    ("vectors that are not turned", "            x = _cumsum_turn(x, VEC)\n", "            x += 0\n"),
    ("sums that are not turned back", "            y = _cumsum_turn(y, VEC)\n", "            y += 0\n"),
    ("vectors across rows", "VEC = math.gcd(N, stride, 16 // size)", "VEC = math.gcd(stride, 16 // size)"),
    (
        "a gradient from left to right",
        'return _cumsum_launch_either("cumsum_backward", grad, kernel, True)',
        'return _cumsum_launch_either("cumsum_backward", grad, kernel, False)',
    ),
]
