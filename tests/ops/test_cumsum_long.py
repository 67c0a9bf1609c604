"""The op of the recipe Cumulative sum of a few long rows and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import TRITON, Ask, ptx, stack
from device_key import at_cuda
from guard import PAD, Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# The launcher's decisions: bytes of a tile at most, programs that a GPU should have, tiles of a group.
USUAL = (16 * 1024, 512, 128)
CHAINS = [(1024, 1, 4), (4096, 1, 2), (2048, 1, 128)]
PLANS = st.sampled_from([USUAL, *CHAINS])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/cumsum_long.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/cumsum_long.py")


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, ...]) -> Iterator[None]:
    """Have the launcher decide by other numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("TILE", "PLACES", "GROUP"), plan, strict=True):
            patch.setattr(taken, f"CUMSUM_LONG_{name}", value)
        yield


def reverse(x: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row."""
    return torch.cumsum(x.flip(-1), -1).flip(-1) if x.ndim else x


SCAN = {"cumsum_long": lambda x: torch.cumsum(x, -1), "cumsum_long_backward": reverse}


def assert_right(taken: ModuleType, name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that a result is as good as a scan within a tile, an exact carry, and its dtype."""
    assert out.device.type == DEVICE.type
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert out.is_contiguous()
    wide = x.double()
    expected, magnitude = SCAN[name](wide), SCAN[name](wide.abs())
    # The additions in a tile, one behind another: NumPy, in the interpreter, makes no tree of them.
    N = x.shape[-1:].numel()
    # On a GPU a thread adds vectors, a warp its threads, and then come the parts of a tile, 32 elements or more.
    most = taken.CUMSUM_LONG_TILE // 4
    depth = 16 + (most // 32 if DEVICE.type == "cuda" else min(N, most))
    # In float64 the carry rounds, too, and so does the reference.
    roundings = 48 + N if out.dtype == torch.float64 else depth
    assert_within(out, expected, magnitude, roundings, floor=torch.finfo(out.dtype).tiny)


@pytest.mark.parametrize("name", SCAN)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 4500), of_x=layouts(), plan=PLANS)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    name: str,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    plan: tuple[int, ...],
) -> None:
    """Either direction is right for any length, layout and plan, and its dtype is that of the argument."""
    x, op = of_x.make((*lead, N), dtype, DEVICE), getattr(taken, name)
    with planned(taken, plan):
        out = guarded(op, x)
        assert torch.equal(op(x), out)
        assert_right(taken, name, x, out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("plan", [USUAL, CHAINS[0]], ids=["usual", "small"])
@pytest.mark.parametrize("N", [8, 40, 1024, 1025, 2050, 5000])
def test_exact(taken: ModuleType, dtype: torch.dtype, plan: tuple[int, ...], N: int) -> None:
    """Small integers leave nothing to rounding: every sum is exact."""
    x = torch.randint(-2, 3, (3, N + 8), device=DEVICE).to(dtype)[:, 8:]
    x = x * (torch.arange(N, device=DEVICE) % 8 == 3)  # half precision has integers up to 256
    with planned(taken, plan):
        for name in SCAN:
            expected = SCAN[name](x.double())
            assert expected.abs().max() <= 256
            assert torch.equal(getattr(taken, name)(x).double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 900), of_x=layouts(), of_grad=layouts(), plan=PLANS)
def test_autograd(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    of_grad: Layout,
    plan: tuple[int, ...],
) -> None:
    """Autograd calls the reverse scan, and for its gradient the scan."""
    x = of_x.make((*lead, N), dtype, DEVICE).requires_grad_()
    grad = of_grad.make((*lead, N), dtype, DEVICE).requires_grad_()
    with planned(taken, plan):
        (out,) = torch.autograd.grad(taken.cumsum_long(x), x, grad, create_graph=True)
        assert torch.equal(out, taken.cumsum_long_backward(grad))
        (again,) = torch.autograd.grad(out, grad, x)
        assert torch.equal(again, taken.cumsum_long(x))


# Lengths of each tile and group, and their neighbours.
LENGTHS = [*(2**k for k in range(0, 18, 2)), 3, 100, 1023, 1025, 3000, 8191, 8193, 20_001, 140_001]


@pytest.mark.parametrize("dtype", first_quickly(torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths as the launcher plans them, with a gap between them."""
    x = Layout("contiguous", N).make((2, N + 8), dtype, DEVICE)[:, 8:]
    for name in SCAN:
        assert_right(taken, name, x, getattr(taken, name)(x))


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above, its words too."""
    x = torch.ones(5000, device=DEVICE)
    with Guard() as guard, planned(taken, CHAINS[0]):
        out = taken.cumsum_long(x)
    sizes = {buffer.untyped_storage().data_ptr(): buffer.numel() - 2 * PAD for buffer in guard.outputs}
    assert sizes[out.untyped_storage().data_ptr()] == 20_000
    assert 8 * (1 + 20) in sizes.values()


def test_plans(taken: ModuleType) -> None:
    """A tile is smaller where programs would be few, and never larger than a short row needs."""
    for shape, tile in (
        ((1, 2**24), 4096),
        ((1024, 2**14), 4096),
        ((1, 2**20), 2048),
        ((1, 2**16), 1024),
        ((4, 60), 64),
        ((10**6, 1), 1),
    ):
        for dtype in FLOATS:
            x = torch.empty(shape, dtype=dtype, device="meta")
            plan = taken._cumsum_long_plan(x, shape[1], False)
            assert plan["BLOCK_N"] == min(tile, 2048 if dtype == torch.float64 else 4096)
            assert shape[1] % plan["VEC"] == 0
            assert plan["VEC"] * dtype.itemsize <= 16
    x = torch.empty(1, 1000, dtype=torch.bfloat16, device="meta")
    assert [taken._cumsum_long_plan(x, stride, True)["VEC"] for stride in (1000, 1004, 1001)] == [8, 4, 1]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    # Triton 3.6 alone does not compile the look-back for one tile.
    one_tile = [] if (DEVICE.type, TRITON) == ("cuda", (3, 6)) else [5]
    for N in (*one_tile, 1000, 4500):
        x = torch.randn(3, N, generator=torch.Generator().manual_seed(N)).to(DEVICE)
        for step in recipe.STEPS.values():
            torch.testing.assert_close(step(x, BLOCK_N=256), x.cumsum(-1), rtol=1e-4, atol=1e-4)
        out = recipe.look_back(x, BLOCK_N=128, WINDOW=4)
        torch.testing.assert_close(out, x.cumsum(-1), rtol=1e-4, atol=1e-4)


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradient, and with the gradient's, of both ops."""
    x = Layout("contiguous", 0).make((2, 5), torch.float64, DEVICE).requires_grad_()
    with planned(taken, (16, 1, 2)):
        for name in SCAN:
            assert torch.autograd.gradcheck(getattr(taken, name), x)
            assert torch.autograd.gradgradcheck(getattr(taken, name), x, fast_mode=True)


@pytest.mark.parametrize("plan", [USUAL, CHAINS[0]], ids=["usual", "small"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype, plan: tuple[int, ...]) -> None:
    """NaN and infinities do what they do in PyTorch, to their own rows."""
    N = 3000
    x = torch.zeros(9, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 1500], x[3, 7], x[3, 2900] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[4, :], x[5, ::2], x[6, 0], x[6, 2000] = torch.nan, torch.inf, torch.inf, torch.nan
    x[7] = torch.full((), -1, dtype=torch.int64).view(torch.float64)  # the bits of a word nobody has written
    x[8, ::7] = -0.0
    with planned(taken, plan):
        for part in (x, x[:, :5], x[:, 1024:2900]):
            for name, expected in SCAN.items():
                torch.testing.assert_close(getattr(taken, name)(part), expected(part), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """Adding up ones does not stand still at the 2048 or 256 where half precision does."""
    x = torch.ones(2, 9000, dtype=dtype, device=DEVICE)
    counts = torch.arange(1, 9001, device=DEVICE).double()
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(taken.cumsum_long(x)[1].double(), counts, rtol=rtol, atol=0)
    torch.testing.assert_close(taken.cumsum_long_backward(x)[1].double(), counts.flip(0), rtol=rtol, atol=0)


@pytest.mark.parametrize("plan", [USUAL, (4096, 1, 16)], ids=["usual", "small"])
def test_carry_accumulator(taken: ModuleType, plan: tuple[int, ...]) -> None:
    """The error does not grow along a row: float32 sums of a large number and ones, far behind the large number."""
    x = torch.zeros(200, 1024, device=DEVICE)
    x[0, 0], x[1:, 5] = 2**26, 1  # which float32 cannot add one by one
    with planned(taken, plan):
        out = taken.cumsum_long(x.view(1, -1)).view(200, 1024)[:, -1]
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
@pytest.mark.parametrize(
    ("rows", "N"),
    [(2**17 + 1, 2**14), (33, 2**26), pytest.param(3, 2**30 - 8, marks=pytest.mark.needs_gpu_memory(30))],
)
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right, with many rows and with few."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, :: N // 128] = 1
    for name, expected in SCAN.items():
        out = getattr(taken, name)(x)
        assert torch.equal(out[-1], expected(x[-1].float()).bfloat16())
        assert not out[:-1].any()
        del out
    view = x[:, : N // 2 - 3]
    assert torch.equal(taken.cumsum_long(view)[-1], torch.cumsum(view[-1].float(), -1).bfloat16())


@pytest.mark.needs_gpu_memory(6)
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_same_bits(taken: ModuleType, rows: int) -> None:
    """However the programs come to run, the bits are the same; and right, when many are under way."""
    x = torch.randn(rows, 2**26 // rows, device=DEVICE)
    for name in SCAN:
        first = getattr(taken, name)(x)
        assert_right(taken, name, x, first)
        for _ in range(20):
            assert torch.equal(getattr(taken, name)(x), first)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "N"), [(7, 5), (3, 20_000)])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, rows: int, N: int) -> None:
    """Both ops pass the whole of opcheck."""
    x = torch.randn(rows, N, device=DEVICE).to(dtype).requires_grad_()
    for op in (taken.cumsum_long, taken.cumsum_long_backward):
        assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: taken.cumsum_long(x * 2), fullgraph=True, dynamic=dynamic)
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
    torch.testing.assert_close(taken.cumsum_long(x), torch.cumsum(x, -1))


def facts(text: str) -> dict[str, Any]:
    """Return what is looked for in PTX."""
    return {
        "wide": set(re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|b32)", text)),
        "shuffles": text.count("shfl.sync"),
        "barriers": text.count("bar.sync"),
        "atomics": set(re.findall(r"atom\.global\.gpu\.relaxed\.(\w+)", text)),
        "volatile": "ld.volatile.global" in text,
    }


def both_ways(taken: ModuleType) -> list[dict[str, Any]]:
    """Return the facts of the op's kernel, forward and backward."""
    tiles = {"ACC": taken.tl.float32, "VEC": 4, "GROUP": 128, "BLOCK_N": 4096, "num_warps": 4, "words_ptr": "i64"}
    return [facts(ptx(taken._cumsum_long_kernel, "fp32", REVERSE=way, **tiles)) for way in (False, True)]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Backwards costs nothing, loads are wide, and words are read each time."""
    ((forward, backward),) = on_h100(gallery / "fusion" / "cumsum_long.py", both_ways)
    assert forward == backward
    assert forward["wide"] == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert forward["atomics"] == {"add", "exch"}
    assert forward["volatile"]


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for tiles of all sizes."""
    found = {}
    for dtype, of in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64")):
        for N in (100, 2**16, 2**20, 2**21, 2**24, 2**24 + 1):
            plan = taken._cumsum_long_plan(torch.empty(1, N, dtype=dtype, device="meta"), N, True)
            found[f"{of} {N}"] = stack(taken._cumsum_long_kernel, dtype=of, words_ptr="i64", **plan)
    return found


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """There are none."""
    (found,) = on_h100(gallery / "fusion" / "cumsum_long.py", spills)
    assert len(found) == 18
    assert not any(found.values()), found


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/cumsum_long")
    moved, two, error, integers, long, in_order, others = out.splitlines()
    assert "5.0 times" in moved
    assert two.endswith(": 2.0")
    assert re.fullmatch(r"largest relative error \d\.\de-0\d, allowed 6\.0e-05", error)
    assert integers.startswith("TypeError: cumsum_long takes floating dtypes")
    assert long.startswith("ValueError: cumsum_long takes rows of up to")
    assert in_order.endswith("{'numbers': True, 'tickets': True}")
    assert others.endswith("{'numbers': False, 'tickets': True}")


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("cumsum_long", lambda normal, M, N: (normal(M, N),), SCAN["cumsum_long"]),
    ("cumsum_long", lambda normal, M, N: (normal(7, M * 303),), SCAN["cumsum_long"]),
    ("cumsum_long_backward", lambda normal, M, N: (normal(7, M * 303),), SCAN["cumsum_long_backward"]),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("tiles stored without a mask", "y + carry.to(ACC), mask=mask)", "y + carry.to(ACC))"),
    ("rows taken for adjacent", "x_ptr + row * stride_xm", "x_ptr + row * N"),
    (
        "a group that closes with its own sum",
        "_cumsum_long_publish(word_ptr, carry + total)",
        "_cumsum_long_publish(word_ptr, total)",
    ),
    (
        "a group that leaves out the one before",
        "tile // GROUP * GROUP - 1 + tl.arange(0, GROUP)",
        "tile // GROUP * GROUP + tl.arange(0, GROUP)",
    ),
    (
        "a carry from the row before",
        "needed = (before >= 0) & (before < tile)",
        "needed = (before >= -1) & (before < tile) & (row * tiles + before >= 0)",
    ),
    (
        "a carry rounded to float32",
        "carry = tl.sum(sums, axis=0)",
        "carry = tl.sum(sums.to(tl.float32), axis=0).to(tl.float64)",
    ),
    ("vectors that are not turned", "        x = _cumsum_long_turn(x, VEC)\n", "        x += 0\n"),
    ("sums that are not turned back", "        y = _cumsum_long_turn(y, VEC)\n", "        y += 0\n"),
    ("vectors across rows", '"VEC": math.gcd(N, stride, 16 // x', '"VEC": math.gcd(stride, 16 // x'),
]
