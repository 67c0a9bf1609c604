"""The op of the recipe Cumulative sum and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import Ask, ptx
from guard import PAD, Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded run shows it")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# The launcher's decisions: how many rows are few; elements of a tile, of a group of tiles.
ROWS = (0, 8192, 2**20)
CHAINS = [(1024, 256, 1024), (1024, 1024, 2048), (1024, 512, 2**17)]
PLANS = st.sampled_from([ROWS, *CHAINS])


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cumsum.py")


@contextmanager
def planned(recipe: ModuleType, plan: tuple[int, ...]) -> Iterator[None]:
    """Have the launcher decide by other numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("FEW", "TILE", "GROUP"), plan, strict=True):
            patch.setattr(recipe, name, value)
        yield


def reverse(x: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row."""
    return torch.cumsum(x.flip(-1), -1).flip(-1) if x.ndim else x


SCAN = {"cumsum": lambda x: torch.cumsum(x, -1), "cumsum_backward": reverse}


def assert_right(recipe: ModuleType, name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that a result is as good as a tree of additions within a tile, an exact carry, and its dtype."""
    assert out.device.type == recipe.DEVICE.type
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert out.is_contiguous()
    wide = x.double()
    expected, magnitude = SCAN[name](wide), SCAN[name](wide.abs())
    # The additions in a tile, one behind another: NumPy, in the interpreter, makes no tree of them.
    N = x.shape[-1:].numel()
    # On a GPU a thread adds vectors, a warp its threads, and then come the parts of a tile, 32 elements or more.
    depth = 16 + (recipe.TILE // 32 if recipe.DEVICE.type == "cuda" else min(N, recipe.TILE))
    # In float64 the carry rounds, too, and so does the reference.
    roundings = 48 + N if out.dtype == torch.float64 else depth
    assert_within(out, expected, magnitude, roundings, floor=torch.finfo(out.dtype).tiny)


@pytest.mark.parametrize("name", SCAN)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts(), plan=PLANS)
def test_value(
    recipe: ModuleType,
    dtype: torch.dtype,
    name: str,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    plan: tuple[int, ...],
) -> None:
    """Either direction is right for any length, layout and plan, and its dtype is that of the argument."""
    x, op = of_x.make((*lead, N), dtype, recipe.DEVICE), getattr(recipe, name)
    with planned(recipe, plan):
        out = guarded(op, x)
        assert torch.equal(op(x), out)
        assert_right(recipe, name, x, out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("plan", [ROWS, CHAINS[0]], ids=["rows", "chain"])
@pytest.mark.parametrize("N", [8, 40, 1024, 1025, 2050, 5000])
def test_exact(recipe: ModuleType, dtype: torch.dtype, plan: tuple[int, ...], N: int) -> None:
    """Small integers leave nothing to rounding: every sum is exact, in more rows than a program has."""
    rows = 2100 // N + 2
    x = torch.randint(-2, 3, (rows, N + 8), device=recipe.DEVICE).to(dtype)[:, 8:]
    x = x * (torch.arange(N, device=recipe.DEVICE) % 8 == 3)  # half precision has integers up to 256
    with planned(recipe, plan):
        for name in SCAN:
            expected = SCAN[name](x.double())
            assert expected.abs().max() <= 256
            assert torch.equal(getattr(recipe, name)(x).double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 900), of_x=layouts(), of_grad=layouts(), plan=PLANS)
def test_autograd(
    recipe: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    of_grad: Layout,
    plan: tuple[int, ...],
) -> None:
    """Autograd calls the reverse scan, and for its gradient the scan."""
    x = of_x.make((*lead, N), dtype, recipe.DEVICE).requires_grad_()
    grad = of_grad.make((*lead, N), dtype, recipe.DEVICE).requires_grad_()
    with planned(recipe, plan):
        (out,) = torch.autograd.grad(recipe.cumsum(x), x, grad, create_graph=True)
        assert torch.equal(out, recipe.cumsum_backward(grad))
        (again,) = torch.autograd.grad(out, grad, x)
        assert torch.equal(again, recipe.cumsum(x))


# Lengths of each block, of tiles and of groups, and their neighbours.
LENGTHS = [*(2**k for k in range(14)), 3, 100, 1023, 3000, 4097, 8191, 8193, 8200, 20_001, 50_000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(recipe: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths as the launcher plans them, with a gap between them."""
    rows = 3 if N > 1024 else 1024 // N + 1
    x = Layout("contiguous", N).make((rows, N + 8), dtype, recipe.DEVICE)[:, 8:]
    for name in SCAN:
        assert_right(recipe, name, x, getattr(recipe, name)(x))


def test_guards_reach_into_the_op(recipe: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above, the chain's words too."""
    x = torch.ones(5000, device=recipe.DEVICE)
    with Guard() as guard, planned(recipe, CHAINS[0]):
        out = recipe.cumsum(x)
    sizes = {buffer.untyped_storage().data_ptr(): buffer.numel() - 2 * PAD for buffer in guard.outputs}
    assert sizes[out.untyped_storage().data_ptr()] == 20_000
    assert 8 * (1 + 20) in sizes.values()


@pytest.mark.parametrize("plan", [ROWS, (1024, 4, 8)], ids=["rows", "chain"])
def test_gradcheck(recipe: ModuleType, plan: tuple[int, ...]) -> None:
    """Differences agree with the gradient, and with the gradient's, of both ops."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, recipe.DEVICE).requires_grad_()
    with planned(recipe, plan):
        for name in SCAN:
            assert torch.autograd.gradcheck(getattr(recipe, name), x)
            assert torch.autograd.gradgradcheck(getattr(recipe, name), x, fast_mode=True)


@pytest.mark.parametrize("plan", [ROWS, CHAINS[1]], ids=["rows", "chain"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype, plan: tuple[int, ...]) -> None:
    """NaN and infinities do what they do in PyTorch, to their own rows."""
    N = 3000
    x = torch.zeros(9, N, dtype=dtype, device=recipe.DEVICE)
    x[0, 5], x[1, N - 1], x[2, 1500], x[3, 7], x[3, 2900] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[4, :], x[5, ::2], x[6, 0], x[6, 2000] = torch.nan, torch.inf, torch.inf, torch.nan
    x[7] = torch.full((), -1, dtype=torch.int64).view(torch.float64)  # the bits of a word nobody has written
    x[8, ::7] = -0.0
    with planned(recipe, plan):
        for part in (x, x[:, :5], x[:, 1024:2900]):
            for name, expected in SCAN.items():
                torch.testing.assert_close(getattr(recipe, name)(part), expected(part), equal_nan=True)


@pytest.mark.parametrize("plan", [ROWS, CHAINS[2]], ids=["rows", "chain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype, plan: tuple[int, ...]) -> None:
    """Adding up ones does not stand still at the 2048 or 256 where half precision does."""
    x = torch.ones(2, 9000, dtype=dtype, device=recipe.DEVICE)
    counts = torch.arange(1, 9001, device=recipe.DEVICE).double()
    with planned(recipe, plan):
        rtol = torch.finfo(dtype).eps
        torch.testing.assert_close(recipe.cumsum(x)[1].double(), counts, rtol=rtol, atol=0)
        torch.testing.assert_close(recipe.cumsum_backward(x)[1].double(), counts.flip(0), rtol=rtol, atol=0)


@pytest.mark.parametrize("plan", [ROWS, (1024, 1024, 2**14)], ids=["rows", "chain"])
def test_carry_accumulator(recipe: ModuleType, plan: tuple[int, ...]) -> None:
    """The error does not grow along a row: float32 sums of a large number and ones, far behind the large number."""
    x = torch.zeros(200, 1024, device=recipe.DEVICE)
    x[0, 0], x[1:, 5] = 2**26, 1  # which float32 cannot add one by one
    with planned(recipe, plan):
        out = recipe.cumsum(x.view(1, -1)).view(200, 1024)[:, -1]
    torch.testing.assert_close(out.double(), 2**26 + torch.arange(200, device=x.device).double(), rtol=2**-23, atol=0)


def test_plans(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are scanned by a program each, or more to one; few long ones by a chain."""
    used = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *_, **options: used.append((self.name, *grid, options["BLOCK_N"], options["num_warps"]))

    monkeypatch.setattr(recipe, "wrap_triton", lambda kernel: Kernel(kernel.fn.__name__))
    few, tile, block = recipe.FEW, recipe.TILE, recipe.BLOCK
    for shape in ((few - 1, 2 * tile + 1), (few, 2 * tile), (few - 1, tile), (few, 60)):
        recipe.scan(torch.empty(shape, device=recipe.DEVICE), False)
    recipe.scan(torch.empty(2, 2 * tile, device=recipe.DEVICE, dtype=torch.float64), True)
    assert used == [
        ("cumsum_long_kernel", 3 * (few - 1), tile, 4),
        ("cumsum_kernel", few, block, 2),
        ("cumsum_kernel", few - 1, block, 2),
        ("cumsum_kernel", few // (block // 64), 64, 2),
        ("cumsum_long_kernel", 2 * 4, tile // 2, 4),
    ]


def test_refuses(recipe: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    for op in (recipe.cumsum, recipe.cumsum_backward):
        for dtype in (torch.int32, torch.bool, torch.complex64):
            with pytest.raises(TypeError, match=rf"takes floating dtypes, not {dtype}"):
                op(x.to(dtype))
        with pytest.raises(ValueError, match="up to 2\\*\\*30 elements"):
            op(x[0, 0].expand(2**30 + 1))


@pytest.mark.needs_gpu_memory(11)
@pytest.mark.parametrize(
    ("rows", "N"),
    [(2**17 + 1, 2**14), (33, 2**26), pytest.param(3, 2**30 - 8, marks=pytest.mark.needs_gpu_memory(30))],
)
def test_beyond_int32(recipe: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, with many rows and with few."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=recipe.DEVICE)
    x[-1, :: N // 128] = 1
    for name, expected in SCAN.items():
        out = getattr(recipe, name)(x)
        assert torch.equal(out[-1], expected(x[-1].float()).bfloat16())
        assert not out[:-1].any()
        del out
    view = x[:, : N // 2 - 3]
    assert torch.equal(recipe.cumsum(view)[-1], torch.cumsum(view[-1].float(), -1).bfloat16())


@pytest.mark.needs_gpu_memory(6)
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_same_bits(recipe: ModuleType, rows: int) -> None:
    """However the programs of a chain come to run, the bits are the same; and right, when many are under way."""
    x = torch.randn(rows, 2**26 // rows, device=recipe.DEVICE)
    for name in SCAN:
        first = getattr(recipe, name)(x)
        assert_right(recipe, name, x, first)
        for _ in range(20):
            assert torch.equal(getattr(recipe, name)(x), first)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "N"), [(7, 5), (3, 20_000), (2000, 5000)])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, rows: int, N: int) -> None:
    """Both ops pass the whole of opcheck, with each kernel."""
    x = torch.randn(rows, N, device=recipe.DEVICE).to(dtype).requires_grad_()
    for op in (recipe.cumsum, recipe.cumsum_backward):
        assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: recipe.cumsum(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 20_000)):
        x = torch.rand(shape, device=recipe.DEVICE, requires_grad=True)
        y, expected = compiled(x), torch.cumsum(x.double() * 2, -1)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
        (d,) = torch.autograd.grad(y.square().sum(), x)
        (expected,) = torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(d, expected, rtol=1e-4, atol=1e-6)


def facts(text: str) -> dict[str, Any]:
    """Return what is looked for in PTX."""
    return {
        "wide": set(re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|b32)", text)),
        "shuffles": text.count("shfl.sync"),
        "barriers": text.count("bar.sync"),
        "atomics": set(re.findall(r"atom\.global\.gpu\.relaxed\.(\w+)", text)),
        "volatile": "ld.volatile.global" in text,
    }


def both_ways(recipe: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Return the facts of the recipe's kernels and of one with `tl.cumsum` alone, each forward and backward."""
    tl = recipe.tl

    @recipe.triton.jit
    def language_kernel(x_ptr, BLOCK_N: tl.constexpr, REVERSE: tl.constexpr):
        ptrs = x_ptr + tl.arange(0, BLOCK_N)
        tl.store(ptrs, tl.cumsum(tl.load(ptrs), 0, reverse=REVERSE))

    known = {"ACC": tl.float32, "VEC": 4}
    tiles = {**known, "GROUP": 128, "BLOCK_N": 8192, "num_warps": 4, "words_ptr": "i64"}
    kernels = {
        "rows": (recipe.cumsum_kernel, {**known, "BLOCK_M": 1, "BLOCK_N": 1024, "num_warps": 2}),
        "long": (recipe.cumsum_long_kernel, tiles),
        "language": (language_kernel, {"BLOCK_N": 1024, "num_warps": 1}),
    }
    return {
        name: [facts(ptx(kernel, "fp32", REVERSE=way, **options)) for way in (False, True)]
        for name, (kernel, options) in kernels.items()
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Backwards costs nothing but where tl.cumsum does it, and words are read each time."""
    (found,) = on_h100(gallery / "fusion" / "cumsum.py", both_ways)
    for forward, backward in (found["rows"], found["long"]):
        assert forward == backward
        assert forward["wide"] == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert found["long"][0]["atomics"] == {"add", "exch"}
    assert found["long"][0]["volatile"]
    forward, backward = (facts["shuffles"] for facts in found["language"])
    assert backward > 5 * forward


@pytest.mark.thorough
@without_a_gpu
def test_page(gallery: Path, tmp_path: Path) -> None:
    """What the page prints without a GPU is what its text says."""
    command = [sys.executable, gallery.resolve() / "fusion" / "cumsum.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    steps, _, subtracted, backwards, *_, lost, kept = run.stdout.splitlines()
    assert steps == "[1, 3, 6, 10, 15, 21, 28, 36]"
    assert subtracted.endswith(" 0.0, 0.0, 0.0]")
    assert backwards.endswith(" 6.0, 3.0, 1.0]")
    assert lost.count("nan") == 4
    assert kept.endswith("[inf, 6.0, 3.0, 1.0]")
    assert run.stderr == ""


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("cumsum", lambda normal, M, N: (normal(M, N),)),
    ("cumsum", lambda normal, M, N: (normal(7, M * 303),)),  # a chain
    ("cumsum_backward", lambda normal, M, N: (normal(M, N),)),
    ("cumsum_backward", lambda normal, M, N: (normal(7, M * 303),)),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sums stored without a mask",
        "tl.store(y_rows + offs, turned(y, VEC, REVERSE), mask)",
        "tl.store(y_rows + offs, turned(y, VEC, REVERSE))",
    ),
    ("tiles of a chain stored without a mask", "y + carry.to(ACC), offs < N)", "y + carry.to(ACC))"),
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
    ("a group that closes with its own sum", "publish(word_ptr, carry + total)", "publish(word_ptr, total)"),
    (
        "a group that leaves out the one before",
        "tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)",
        "tile // GROUP * GROUP + tl.arange(0, GROUP)",
    ),
    ("vectors that are not turned", "if REVERSE and VEC >> log > 1:", "if REVERSE and VEC >> log > 4:"),
]
