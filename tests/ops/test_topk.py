"""The op of the recipe Top-k, with every plan of its launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, ptx, stack
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (3,), (2, 2), (9,)])
LONGEST = 8192


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/topk.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/topk.py")


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_right(taken: ModuleType, x: torch.Tensor, k: int) -> None:
    """Assert that values and indices are those of PyTorch, equals by index, and that no other memory is changed."""
    values, indices = guarded(lambda x: taken.topk(x, k), x)
    assert values.dtype == x.dtype
    assert indices.dtype == torch.int64
    assert values.is_contiguous()
    assert indices.is_contiguous()
    # A stable sort, and PyTorch's own values; -0.0 equals 0.0, and NaN is the largest. On the CPU: on a GPU, torch.sort
    # of rows beyond some length puts NaN with a sign bit last, https://github.com/pytorch/pytorch/issues/190781.
    x, values, indices = x.cpu(), values.cpu(), indices.cpu()
    expected = torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k] if x.ndim else indices * 0
    assert torch.equal(indices, expected)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(values, torch.topk(x, k).values, **exactly)
    # The values are those elements, to the bit: to the sign of a zero. A GPU may give one NaN for another.
    chosen = x.gather(-1, indices) if x.ndim else x
    assert ((bits(values) == bits(chosen)) | chosen.isnan()).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(128, 700), of_x=layouts(), data=st.data())
def test_value(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of_x: Layout, data: st.DataObject
) -> None:
    """Values and indices are right for any length, layout and k, with many ties and with none."""
    k = data.draw(st.integers(0, min(N, 9)), label="k")
    x = of_x.make((*lead, N), dtype, DEVICE)
    x = x if data.draw(st.booleans(), label="ties") else (x * 2).round()
    assert_right(taken, x, k)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [150, 37])
def test_special_values(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """NaN of either sign is largest, zeros of either sign are equal, and rows may have nothing but -inf."""
    x = torch.linspace(-3, -1, 7 * N, dtype=torch.float64, device=DEVICE).view(7, N)  # no positive number
    x[0, 9::16], x[1, 30], x[1, 34], x[1, 36] = -0.0, torch.nan, -torch.nan, torch.inf
    x[0, 4::16], x[2], x[3, : N - 5] = 0.0, -torch.inf, -torch.inf
    x[4, ::2], x[5] = -torch.nan, torch.nan
    x[6, 20:30], x[6, 35] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    assert_right(taken, x.to(dtype), 7)
    assert_right(taken, x.to(dtype)[:, 3:8], 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_order(taken: ModuleType, dtype: torch.dtype, order: str) -> None:
    """Sorted rows, in which the largest are in all columns or come last, at any address, and rows of equals."""
    x = torch.arange(501, device=DEVICE).to(dtype).expand(4, -1) - 250
    x = {"rising": x.contiguous(), "falling": x.flip(-1), "equal": x * 0}[order]
    assert_right(taken, x, 6)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_columns_with_the_largest_in_one(taken: ModuleType, dtype: torch.dtype) -> None:
    """All that is asked for may be in one column, in one part of it, or in the row's last elements."""
    for N in (1000, 4096, 5000):
        SETS = taken._topk_plan(N, 8)["SETS"]
        x = torch.zeros(3, N, dtype=dtype, device=DEVICE)
        x[0, 3::SETS] = 1
        x[1, 3 : 3 + 4 * SETS : SETS] = 2
        x[2, -8:] = torch.arange(8, device=DEVICE).to(dtype)
        assert_right(taken, x, 8)


@pytest.mark.parametrize("k", [1, 2, 33, 128])
def test_many(taken: ModuleType, k: int) -> None:
    """Any k up to the largest, of rows that are no longer and of longer ones."""
    for N in (k, 300):
        assert_right(taken, Layout("contiguous", k).make((1, N), torch.float32, DEVICE), k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_longest(taken: ModuleType, dtype: torch.dtype) -> None:
    """The longest row, and one a little shorter, in every plan's form."""
    for N, k in ((LONGEST, 3), (LONGEST - 5, 20)):
        assert_right(taken, Layout("offset", k).make((1, N), dtype, DEVICE), k)


def test_scalar_and_empty(taken: ModuleType) -> None:
    """No dimension, no rows, no columns, no k."""
    for k in (0, 1):
        assert_right(taken, torch.tensor(3.0, device=DEVICE), k)
    for shape, k in (((0, 5), 3), ((4, 0), 0), ((2, 7), 0), ((0,), 0)):
        values, indices = taken.topk(torch.ones(shape, device=DEVICE), k)
        assert values.shape == indices.shape == (*shape[:-1], k)


def test_plan(taken: ModuleType) -> None:
    """Columns cover a row, and there are as many as are asked for; a warp has registers for them."""
    for N, K in itertools.product((1, 5, 64, 100, 256, 1000, 4096, LONGEST), (2, 8, 32, 128)):
        plan = taken._topk_plan(N, K)
        SETS, LENGTH, PART = plan["SETS"], plan["LENGTH"], plan["PART"]
        assert max(N, K) <= SETS * LENGTH
        assert 2 * max(N, K) > SETS * LENGTH
        assert SETS >= K
        assert PART < LENGTH or PART == LENGTH == 1
        assert LENGTH <= 64
        assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * SETS <= 128
        assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * SETS * LENGTH <= 4096
    assert [taken._topk_plan(4096, 8)[name] for name in ("SETS", "LENGTH", "PART")] == [64, 64, 8]


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (64, 300):
        x = torch.randn(9, N, generator=torch.Generator().manual_seed(N)).to(recipe.DEVICE)
        expected = torch.topk(x, 5)
        for step in recipe.STEPS.values():
            _, (values, indices) = step(x, 5)
            assert torch.equal(values, expected.values)
            assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradient(taken: ModuleType, dtype: torch.dtype) -> None:
    """The gradient goes back to the elements, in every dtype."""
    x = Layout("transposed", 3).make((2, 3, 20), dtype, DEVICE).requires_grad_()
    values, indices = taken.topk(x, 4)
    assert not indices.requires_grad
    grad = Layout("contiguous", 4).make(values.shape, dtype, DEVICE)
    (d,) = torch.autograd.grad(values, x, grad)
    (expected,) = torch.autograd.grad(torch.topk(x, 4).values, x, grad)
    assert torch.equal(d, expected)


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradient, and with the gradient's gradient."""
    x = Layout("contiguous", 0).make((2, 6), torch.float64, DEVICE).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: taken.topk(x, 3)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: taken.topk(x, 3)[0], x)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 200, device=DEVICE)
    with pytest.raises(TypeError, match=r"^topk takes a float tensor, not torch\.int32"):
        taken.topk(x.int(), 3)
    for k in (-1, 201, 129):
        with pytest.raises(ValueError, match=rf"^topk takes k from 0 to the row's length 200, and up to 128, not {k}"):
            taken.topk(x, k)
    with pytest.raises(ValueError, match=r"^topk takes rows of up to 8192 elements, not 8193; topk_long takes longer"):
        taken.topk(x[0, 0].expand(LONGEST + 1), 1)


def test_launcher_is_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between; the same bits each time."""
    for dtype in (torch.float32, torch.float64):
        x = Layout("contiguous", 0).make((3, 40), dtype, DEVICE).round()
        out, expected = at_cuda(taken.topk, x, 5), taken.topk(x, 5)
        assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("M", "N", "k"), [(3000, 4096, 8), (5000, 77, 3), (9, 3000, 128), (64, 8192, 64)])
def test_large(taken: ModuleType, dtype: torch.dtype, M: int, N: int, k: int) -> None:
    """Rows as the launcher plans them, with ties and without."""
    for ties in (False, True):
        x = torch.randn(M, N, device=DEVICE).to(dtype)
        assert_right(taken, x.round() if ties else x, k)


@pytest.mark.needs_gpu_memory(8)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last elements of the last row are found."""
    x = torch.zeros(2**18 + 1, 2**13, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -2], x[-1, 5], x[-1, -1] = 3, 2, 1
    values, indices = taken.topk(x, 3)
    assert values[-1].tolist() == [3, 2, 1]
    assert indices[-1].tolist() == [2**13 - 2, 5, 2**13 - 1]
    assert (indices[:-1] == torch.arange(3, device=x.device)).all()


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("N", "k"), [(50, 3), (8000, 8)])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int, k: int) -> None:
    """The op passes the whole of opcheck, with each kernel."""
    x = torch.randn(2, N, device=DEVICE).to(dtype).requires_grad_()
    assert set(torch.library.opcheck(taken.topk, (x, k)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, k: taken.topk(x * 2, k), fullgraph=True, dynamic=dynamic)
    for M, N, k in ((4, 100, 3), (6, 100, 3), (2, 8000, 8)):
        x = torch.randn(M, N, device=DEVICE, requires_grad=True)
        values, _ = compiled(x, k)
        expected = torch.topk(x * 2, k).values
        torch.testing.assert_close(values, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (values, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    x = torch.randn(5, 100, device="cuda:1")
    assert torch.equal(taken.topk(x, 3)[0], torch.topk(x, 3).values)


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for plans of all kinds."""
    found = {}
    for of, N, K in (("fp32", 4096, 8), ("fp32", 1000, 8), ("bf16", 8192, 8), ("bf16", 256, 64)):
        plan = taken._topk_plan(N, K)
        found[f"{of} {N}"] = stack(taken._topk_kernel, dtype=of, indices_ptr="i64", **plan)
    return found


def widths(taken: ModuleType) -> set[str]:
    """Return how a thread loads elements of its columns."""
    text = ptx(taken._topk_kernel, "fp32", multiples=("N", "stride_xm"), indices_ptr="i64", **taken._topk_plan(4096, 8))
    return set(re.findall(r"ld\.global\.v\d", text))


@pytest.mark.thorough
def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Nothing is spilled, and a thread loads its two columns at once."""
    spilled, loads = on_h100(gallery / "fusion" / "topk.py", spills, widths)
    assert not any(spilled.values())
    assert loads == {"ld.global.v2"}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/topk")
    plain, read, error, *more, long, many, integers, wrong, right = out.splitlines()
    assert plain == "[[9.0, 6.0, 5.0]] [[5, 7, 4]]"
    assert read.startswith("x is read 3 times")
    assert error == "largest error 0.0, allowed 0.0"
    assert more[-1] == "4096: 4096, 192"
    assert long.startswith("ValueError: topk takes rows of up to 8192 elements")
    assert many.endswith("not 129")
    assert integers == "TypeError: topk takes a float tensor, not torch.int32"
    assert wrong == "by bits  [nan, 1.0, nan, -3.0, -2.0, -0.5]"
    assert right == "by topk  [nan, nan, 1.0, -0.5, -2.0, -3.0]"


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("topk", lambda normal, M, N: (normal(M, N), 8), lambda x, k: tuple(torch.topk(x, k))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("columns without a mask", "mask=offs < N, other=-float", "mask=offs < N + STEP, other=-float"),
    ("padding that wins", "    words = tl.where(first < N, words, LOWEST)\n", ""),
    ("a maximum's last occurrence", "larger = (~(wide <= top))", "larger = (~(wide < top))"),
    ("NaN behind NaN", "(~(wide <= top)) & (top == top)", "~(wide <= top)"),
    ("NaN that a column leaves out", "(~(wide <= top)) & (top == top)", "wide > top"),
    ("negative floats in reverse", "    key = tl.where(bits < 0, bits ^ TOP, bits)", "    key = bits"),
    ("two zeros", "    key = tl.where(wide == 0, 0, key)\n", ""),
    ("NaN by its bits", "return tl.where(wide == wide, key, TOP)", "return key"),
    ("the higher index first", "(key << BITS) | (LAST - index)", "(key << BITS) | (LAST - (index ^ 1))"),
    ("columns of neighbours", "first = index % SETS + index // GROUP * GROUP", "first = index // LENGTH * LENGTH"),
    ("parts that all begin at the first", "(SETS * PART)\n", "0\n"),
    (
        "indices stored without a mask",
        "index.to(tl.int64), mask=mask)\n\n\n@triton.jit\ndef _topk_p",
        "index.to(tl.int64))\n\n\n@triton.jit\ndef _topk_p",
    ),
    ("rows behind the last", "    offs_m = tl.minimum(offs_m, M - 1)\n", ""),
    ("rows taken for adjacent", "offs_m * stride_xm", "offs_m * N"),
]
