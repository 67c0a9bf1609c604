"""The op of the recipe Top-k of long rows, with parts of several lengths."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, stack
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (3,), (2, 2)])
# Elements that are worth a program, programs that fill a GPU, and words that one merges. The second and the third have
# many parts, and the third merges more than once.
PLANS = [(4096, 1024, 1024), (64, 2**20, 1024), (32, 2**20, 64)]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/topk_long.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/topk_long.py")


@contextmanager
def planned(taken: ModuleType, part: int, programs: int, merge: int) -> Iterator[None]:
    """Have the launcher share rows by other numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "TOPK_LONG_PART", part)
        patch.setattr(taken, "TOPK_LONG_PROGRAMS", programs)
        patch.setattr(taken, "TOPK_LONG_MERGE", merge)
        yield


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_right(taken: ModuleType, x: torch.Tensor, k: int) -> None:
    """Assert that values and indices are those of PyTorch, equals by index, and that no other memory is changed."""
    values, indices = guarded(lambda x: taken.topk_long(x, k), x)
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
@settings(max_examples=10)
@given(lead=LEADS, N=sizes(64, 300), of_x=layouts(), plan=st.sampled_from(PLANS), data=st.data())
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    plan: tuple[int, int, int],
    data: st.DataObject,
) -> None:
    """Values and indices are right for any length, layout, k and plan, with many ties and with none."""
    k = data.draw(st.integers(0, min(N, 9)), label="k")
    x = of_x.make((*lead, N), dtype, DEVICE)
    x = x if data.draw(st.booleans(), label="ties") else (x * 2).round()
    with planned(taken, *plan):
        assert_right(taken, x, k)


@pytest.mark.parametrize("plan", PLANS, ids=["whole", "shared", "merged twice"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(taken: ModuleType, dtype: torch.dtype, plan: tuple[int, int, int]) -> None:
    """NaN of either sign is largest, zeros of either sign are equal, and rows may have nothing but -inf."""
    N = 150
    x = torch.linspace(-3, -1, 7 * N, dtype=torch.float64, device=DEVICE).view(7, N)  # no positive number
    x[0, 9::16], x[1, 30], x[1, 40], x[1, 50] = -0.0, torch.nan, -torch.nan, torch.inf
    x[0, 4::16], x[2], x[3, :145] = 0.0, -torch.inf, -torch.inf
    x[4, ::2], x[5] = -torch.nan, torch.nan
    x[6, 20:30], x[6, 100] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    with planned(taken, *plan):
        assert_right(taken, x.to(dtype), 7)
        assert_right(taken, x.to(dtype)[:, 3:8], 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_order(taken: ModuleType, dtype: torch.dtype, order: str) -> None:
    """Sorted rows, in which the largest are in one part or come last, at any address, and rows of equals."""
    x = torch.arange(259, device=DEVICE).to(dtype).expand(2, -1) - 300  # a last part of 3
    x = {"rising": x.contiguous(), "falling": x.flip(-1), "equal": x * 0}[order]
    for plan in PLANS:
        with planned(taken, *plan):
            assert_right(taken, x, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_as_planned(taken: ModuleType, dtype: torch.dtype) -> None:
    """More than one part as the launcher makes them, the last of which has fewer elements than k."""
    x = Layout("offset", 1).make((1, 4099), dtype, DEVICE)
    x[0, 4096:] = 9
    assert_right(taken, x, 8)


@pytest.mark.parametrize("k", [1, 33, 128])
def test_many(taken: ModuleType, k: int) -> None:
    """Any k up to the largest, of rows that are no longer and of longer ones, shared or not."""
    for N, plan in ((k, PLANS[0]), (300, PLANS[1])):
        with planned(taken, *plan):
            assert_right(taken, Layout("contiguous", k).make((1, N), torch.float32, DEVICE), k)


def test_scalar_and_empty(taken: ModuleType) -> None:
    """No dimension, no rows, no columns, no k."""
    for k in (0, 1):
        assert_right(taken, torch.tensor(3.0, device=DEVICE), k)
    for shape, k in (((0, 5), 3), ((4, 0), 0), ((2, 7), 0), ((0,), 0)):
        values, indices = taken.topk_long(torch.ones(shape, device=DEVICE), k)
        assert values.shape == indices.shape == (*shape[:-1], k)


def test_plan(taken: ModuleType) -> None:
    """A part has columns for all that is asked for, and an index within it has room in a word."""
    for M, N, K in itertools.product((1, 60, 20_000), (1, 5, 1000, 8193, 50_257, 201_088, 2**30), (2, 8, 128)):
        for size in (2, 4):
            plan = taken._topk_long_plan(M, N, K, size)
            part = plan["SETS"] * plan["LENGTH"]
            assert plan["SETS"] >= K
            assert part <= (2**14 if size == 2 else 2**16)
            assert part >= min(N, 4096)
            assert plan["SHARE"] < plan["LENGTH"] or plan["SHARE"] == plan["LENGTH"] == 1


@pytest.mark.parametrize("plan", PLANS, ids=["whole", "shared", "merged twice"])
def test_gradient(taken: ModuleType, plan: tuple[int, int, int]) -> None:
    """The gradient goes back to the elements, in every dtype; so does the gradient's gradient."""
    with planned(taken, *plan):
        for dtype in FLOATS:
            x = Layout("transposed", 3).make((2, 3, 70), dtype, DEVICE).requires_grad_()
            values, indices = taken.topk_long(x, 4)
            assert not indices.requires_grad
            grad = Layout("contiguous", 4).make(values.shape, dtype, DEVICE)
            (d,) = torch.autograd.grad(values, x, grad)
            (expected,) = torch.autograd.grad(torch.topk(x, 4).values, x, grad)
            assert torch.equal(d, expected)
    x = Layout("contiguous", 0).make((2, 6), torch.float64, DEVICE).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: taken.topk_long(x, 3)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: taken.topk_long(x, 3)[0], x)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE)
    expected = torch.topk(x, 5)
    steps = [*recipe.STEPS.values(), lambda x, k: recipe.sort_parts(x, k, PART=64)]
    steps += [lambda x, k: recipe.with_parts(x, k, 64)]
    for step in steps:
        values, indices = step(x, 5)
        assert torch.equal(values, expected.values)
        assert torch.equal(indices, expected.indices)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 200, device=DEVICE)
    with pytest.raises(TypeError, match=r"^topk_long takes a float tensor, not torch\.int32"):
        taken.topk_long(x.int(), 3)
    for k in (-1, 201, 129):
        with pytest.raises(ValueError, match=rf"^topk_long takes k from 0 to the row's length 200, and .* not {k}"):
            taken.topk_long(x, k)
    with pytest.raises(ValueError, match=r"^topk_long takes rows of up to 2\*\*30 elements"):
        taken.topk_long(x[0, 0].expand(2**30 + 1), 1)


def test_launcher_is_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between; the same bits for any parts."""
    for dtype in (torch.float32, torch.float64):
        x = Layout("contiguous", 0).make((3, 200), dtype, DEVICE).round()
        expected = taken.topk_long(x, 5)
        for plan in PLANS:
            with planned(taken, *plan):
                out = at_cuda(taken.topk_long, x, 5)
            assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "k"), [(3000, 9000, 8), (3, 300_001, 30), (2, 2**21, 8), (1, 151_936, 128), (60, 50_257, 64)]
)
def test_large(taken: ModuleType, dtype: torch.dtype, M: int, N: int, k: int) -> None:
    """Rows as the launcher plans them, with ties and without."""
    for ties in (False, True):
        x = torch.randn(M, N, device=DEVICE).to(dtype)
        assert_right(taken, x.round() if ties else x, k)


@pytest.mark.needs_gpu_memory(8)
@pytest.mark.parametrize(("M", "N"), [(2**17 + 1, 2**14), (3, 2**30 - 8)])
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last elements of the last row are found."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -2], x[-1, 5], x[-1, -1] = 3, 2, 1
    values, indices = taken.topk_long(x, 3)
    assert values[-1].tolist() == [3, 2, 1]
    assert indices[-1].tolist() == [N - 2, 5, N - 1]
    assert (indices[:-1] == torch.arange(3, device=x.device)).all()


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("N", "k"), [(50, 3), (30_000, 8), (300_000, 64)])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int, k: int) -> None:
    """The op passes the whole of opcheck, with each kernel."""
    x = torch.randn(2, N, device=DEVICE).to(dtype).requires_grad_()
    assert set(torch.library.opcheck(taken.topk_long, (x, k)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, k: taken.topk_long(x * 2, k), fullgraph=True, dynamic=dynamic)
    for M, N, k in ((4, 100, 3), (6, 100, 3), (2, 30_000, 8)):
        x = torch.randn(M, N, device=DEVICE, requires_grad=True)
        values, _ = compiled(x, k)
        expected = torch.topk(x * 2, k).values
        torch.testing.assert_close(values, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (values, expected)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    x = torch.randn(5, 20_000, device="cuda:1")
    assert torch.equal(taken.topk_long(x, 3)[0], torch.topk(x, 3).values)


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for plans of all kinds."""
    found = {}
    for of, size, M, N, K in (("fp32", 4, 1, 151_936, 8), ("bf16", 2, 1000, 128_256, 8), ("fp32", 4, 1000, 128_256, 8)):
        plan = taken._topk_long_plan(M, N, K, size) | {"indices_ptr": "i64", "words_ptr": "i64", "WHOLE": False}
        found[f"{of} {M} {N}"] = stack(taken._topk_long_kernel, dtype=of, **plan)
    merge = {"indices_ptr": "i64", "words_ptr": "i64", "merged_ptr": "i64", "BLOCK": 1024, "WHOLE": True}
    found["merge"] = stack(taken._topk_long_merge_kernel, dtype="fp32", num_warps=8, K=8, **merge)
    return found


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """Nothing is spilled."""
    (found,) = on_h100(gallery / "fusion" / "topk_long.py", spills)
    assert not any(found.values())


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    read, error, many, long, integers, wrong, right = printed("fusion/topk_long").splitlines()
    assert read == "60,120 numbers are read; x has 60,000"
    assert error == "largest error 0.0, allowed 0.0"
    assert all(line.startswith("ValueError: topk_long takes k from 0 to the row's length") for line in (many, long))
    assert integers == "TypeError: topk_long takes a float tensor, not torch.int32"
    assert wrong == "2 of each part [[15.0, 14.0, 11.0, 10.0]]"
    assert right == "topk_long      [[15.0, 14.0, 13.0, 12.0]]"


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("topk_long", lambda normal, M, N: (normal(M, N), 8), lambda x, k: tuple(torch.topk(x, k))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a part that reads the next one", "count = tl.minimum(N - start, SETS * LENGTH)", "count = N - start + 1"),
    ("a maximum's last occurrence", "larger = (~(wide <= top))", "larger = (~(wide < top))"),
    ("NaN that a column leaves out", "(~(wide <= top)) & (top == top)", "wide > top"),
    ("negative floats in reverse", "    key = tl.where(bits < 0, bits ^ TOP, bits)", "    key = bits"),
    ("two zeros", "    key = tl.where(wide == 0, 0, key)\n", ""),
    ("NaN by its bits", "return tl.where(wide == wide, key, TOP)", "return key"),
    ("columns of neighbours", "first = index % SETS + index // GROUP * GROUP", "first = index // LENGTH * LENGTH"),
    ("shares that all begin at the first", "(SETS * SHARE)\n", "0\n"),
    ("indices within the part", "(2**31 - 1 - (start + index))", "(2**31 - 1 - index)"),
    ("words of other rows", "words_row + offs, mask=offs < count, other=-(2**63)", "words_row + offs"),
    ("indices stored without a mask", "index.to(tl.int64), mask=mask)", "index.to(tl.int64))"),
]
