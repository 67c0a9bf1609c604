"""The op of the recipe Top-k, with every plan of its launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from sys import executable
from types import ModuleType

import pytest
import torch
from compiled import Ask, ptx
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded run shows it")

LEADS = st.sampled_from([(), (1,), (0,), (3,), (2, 2)])
# The launcher's decisions: elements that are worth a program, programs that fill a GPU. None: rows are not shared.
PLANS = st.sampled_from([(4096, 1024), (64, 2**20), (200, 2**20)])


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/topk.py")


@contextmanager
def planned(recipe: ModuleType, part: int, programs: int) -> Iterator[None]:
    """Have the launcher share rows by other numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "PART", part)
        patch.setattr(recipe, "PROGRAMS", programs)
        yield


def assert_right(recipe: ModuleType, x: torch.Tensor, k: int) -> None:
    """Assert that values and indices are those of PyTorch, equals by index, and that no other memory is changed."""
    values, indices = guarded(lambda x: recipe.topk(x, k), x)
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


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(128, 700), of_x=layouts(), plan=PLANS, data=st.data())
def test_value(
    recipe: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    plan: tuple[int, int],
    data: st.DataObject,
) -> None:
    """Values and indices are right for any length, layout, k and plan, with many ties and with none."""
    k = data.draw(st.integers(0, min(N, 9)), label="k")
    x = of_x.make((*lead, N), dtype, recipe.DEVICE)
    x = x if data.draw(st.booleans(), label="ties") else (x * 2).round()
    with planned(recipe, *plan):
        assert_right(recipe, x, k)


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype, shared: bool) -> None:
    """NaN of either sign is largest, zeros of either sign are equal, and rows may have nothing but -inf."""
    N = 150
    x = torch.linspace(-3, -1, 7 * N, dtype=torch.float64, device=recipe.DEVICE).view(7, N)  # no positive number
    x[0, 9::16], x[1, 30], x[1, 40], x[1, 50] = -0.0, torch.nan, -torch.nan, torch.inf
    x[0, 4::16], x[2], x[3, :145] = 0.0, -torch.inf, -torch.inf
    x[4, ::2], x[5] = -torch.nan, torch.nan
    x[6, 20:30], x[6, 100] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    with planned(recipe, *((64, 2**20) if shared else (4096, 1024))):
        assert_right(recipe, x.to(dtype), 7)
        assert_right(recipe, x.to(dtype)[:, 3:8], 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_order(recipe: ModuleType, dtype: torch.dtype, order: str) -> None:
    """Sorted rows, in which the largest share a few pieces or come last, at any address, and rows of equals."""
    x = torch.arange(501, device=recipe.DEVICE).to(dtype).expand(4, -1) - 250
    x = {"rising": x.contiguous(), "falling": x.flip(-1), "equal": x * 0}[order]
    for plan in ((4096, 1024), (64, 2**20)):
        with planned(recipe, *plan):
            assert_right(recipe, x, 6)


@pytest.mark.parametrize("k", [1, 2, 33, 128])
def test_many(recipe: ModuleType, k: int) -> None:
    """Any k up to the largest, of rows that are hardly longer and of longer ones, shared or not."""
    for N in (k, 400):
        x = torch.randn(1, N, device=recipe.DEVICE)
        assert_right(recipe, x, k)
    with planned(recipe, 256, 2**20):
        assert_right(recipe, x, k)


def test_scalar_and_empty(recipe: ModuleType) -> None:
    """No dimension, no rows, no columns, no k."""
    assert_right(recipe, torch.tensor(3.0, device=recipe.DEVICE), 1)
    for shape, k in (((0, 5), 3), ((4, 0), 0), ((2, 7), 0), ((0,), 0)):
        values, indices = recipe.topk(torch.ones(shape, device=recipe.DEVICE), k)
        assert values.shape == indices.shape == (*shape[:-1], k)


def test_plan(recipe: ModuleType) -> None:
    """Sets and pieces cover a part, parts cover a row, and a set is as long as the sort of the sets is short."""
    for M in (1, 60, 20_000):
        for N in (1, 5, 1000, 4096, 50_257, 2**20, 2**30):
            for K in (2, 8, 128):
                parts, sets, each = recipe.plan(M, N, 4, K)
                assert parts * sets * each * 4 >= N
                assert (parts - 1) * sets * each * 4 < N
                assert sets >= K
                assert each * 4 * sets <= 16 * recipe.PART
    assert recipe.plan(16_384, 4096, 4, 8) == (1, 128, 8)
    assert recipe.plan(64, 128_256, 4, 8)[0] == 16


@pytest.mark.parametrize("plan", [(4096, 1024), (8, 2**20)], ids=["whole", "shared"])
def test_gradient(recipe: ModuleType, plan: tuple[int, int]) -> None:
    """The gradient goes back to the elements, in every dtype; so does the gradient's gradient."""
    with planned(recipe, *plan):
        for dtype in FLOATS:
            x = Layout("transposed", 3).make((2, 3, 20), dtype, recipe.DEVICE).requires_grad_()
            values, indices = recipe.topk(x, 4)
            assert not indices.requires_grad
            grad = torch.randn(values.shape, device=x.device).to(dtype)
            (d,) = torch.autograd.grad(values, x, grad)
            (expected,) = torch.autograd.grad(torch.topk(x, 4).values, x, grad)
            assert torch.equal(d, expected)
    x = torch.randn(2, 6, device=recipe.DEVICE).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: recipe.topk(x, 3)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: recipe.topk(x, 3)[0], x)


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 200, device=recipe.DEVICE)
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        recipe.topk(x.int(), 3)
    for k in (-1, 201):
        with pytest.raises(ValueError, match=rf"k from 0 to the row's length 200, not {k}"):
            recipe.topk(x, k)
    with pytest.raises(ValueError, match="k up to 128, not 129"):
        recipe.topk(x, 129)
    with pytest.raises(ValueError, match="up to 2\\*\\*30 elements"):
        recipe.topk(x[0, 0].expand(2**30 + 1), 1)


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "k"), [(3000, 4096, 8), (5000, 77, 3), (3, 300_001, 30), (2, 2**21, 8), (9, 3000, 128)]
)
def test_large(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, k: int) -> None:
    """Rows as the launcher plans them, with ties and without."""
    for ties in (False, True):
        x = torch.randn(M, N, device=recipe.DEVICE).to(dtype)
        assert_right(recipe, x.round() if ties else x, k)


@pytest.mark.needs_gpu_memory(8)
@pytest.mark.parametrize(("M", "N"), [(2**17 + 1, 2**14), (3, 2**30 - 8)])
def test_beyond_int32(recipe: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last elements of the last row are found."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=recipe.DEVICE)
    x[-1, -2], x[-1, 5], x[-1, -1] = 3, 2, 1
    values, indices = recipe.topk(x, 3)
    assert values[-1].tolist() == [3, 2, 1]
    assert indices[-1].tolist() == [N - 2, 5, N - 1]
    assert (indices[:-1] == torch.arange(3, device=x.device)).all()


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("N", "k"), [(50, 3), (30_000, 8)])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, N: int, k: int) -> None:
    """The op passes the whole of opcheck, with each kernel."""
    x = torch.randn(2, N, device=recipe.DEVICE).to(dtype).requires_grad_()
    assert set(torch.library.opcheck(recipe.topk, (x, k)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradient, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, k: recipe.topk(x * 2, k), fullgraph=True, dynamic=dynamic)
    for M, N, k in ((4, 100, 3), (6, 100, 3), (2, 30_000, 8)):
        x = torch.randn(M, N, device=recipe.DEVICE, requires_grad=True)
        values, _ = compiled(x, k)
        expected = torch.topk(x * 2, k).values
        torch.testing.assert_close(values, expected)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (values, expected)), strict=True):
            torch.testing.assert_close(a, b)


def widths(recipe: ModuleType) -> set[int]:
    """Return how many bytes the copies in a kernel's loop load at a time."""
    known = {"indices_ptr": "i64", "words_ptr": "i64", "P": 4, "K": 8, "SETS": 128, "EACH": 8, "WHOLE": True}
    text = ptx(recipe.topk_kernel, "fp32", 1, **known)
    return {int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*, (\w+), ", text)}


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Pieces are loaded at once: the compiler is told of no length that 4 divides."""
    (found,) = on_h100(gallery / "fusion" / "topk.py", widths)
    assert found == {16}


@pytest.mark.thorough
@without_a_gpu
def test_page(gallery: Path, tmp_path: Path) -> None:
    """What the page prints without a GPU is what its text says."""
    command = [executable, gallery.resolve() / "fusion" / "topk.py"]
    page = run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    plain, wrong, right = page.stdout.splitlines()
    assert plain == "[[9.0, 6.0, 5.0]] [[5, 7, 4]]"
    assert wrong == "by bits  [nan, 1.0, nan, -3.0, -2.0, -0.5]"
    assert right == "by topk  [nan, nan, 1.0, -0.5, -2.0, -3.0]"
    assert page.stderr == ""


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("topk", lambda normal, M, N: (normal(M, N), 8)),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("no element before the first piece", "tl.where(edge < head, edge, edge + length)", "edge + length"),
    ("numbers of elements from the first piece", "pack(x, head + offs,", "pack(x, offs,"),
    ("indices stored without a mask", "index.to(tl.int64), mask)", "index.to(tl.int64))"),
    ("negative floats in reverse", "tl.where(bits < 0, bits ^ TOP, bits)", "bits"),
    ("places without their last bit", "| (index ^ LAST)", "| (index ^ LAST) & -2"),
    ("NaN by its bits", "return tl.where(x == x, key, TOP)", "return key"),
    ("sets of neighbours", "piece += SETS * tl.arange(0, EACH)", "piece += tl.arange(0, EACH)"),
    ("two zeros", "bits = tl.where(x == 0, 0, bits)", "bits = bits"),
    ("parts that all begin at the first", "first = part * SETS * EACH", "first = 0 * part * SETS * EACH"),
]
