"""The ops of the recipe Few long rows: values, gradients, and the same bits in any batch."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly, layouts, sizes
from tolerance import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# Bytes of a row that is one part, and of a part.
ITS_OWN = (128 * 1024, 32 * 1024)
THREE = (32, 16)  # passes, from 17 elements on in float64 and from 33 in the others
PLANS = st.sampled_from([ITS_OWN, (4096, 2048), THREE])
NAMES = {"few_long_rows_sum": torch.sum, "few_long_rows_logsumexp": torch.logsumexp}
each_op = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/few_long_rows.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/few_long_rows.py")


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, int]) -> Iterator[None]:
    """Have the launcher split rows in another way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "FEW_LONG_ROWS_WHOLE", plan[0])
        patch.setattr(taken, "FEW_LONG_ROWS_PART", plan[1])
        taken._few_long_rows_plan.cache_clear()
        yield
    taken._few_long_rows_plan.cache_clear()


def result(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the results."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_value(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator."""
    assert out.device.type == DEVICE.type
    assert out.shape == x.shape[:-1]
    assert out.dtype == result(x.dtype)
    assert out.is_contiguous()
    wide = x.double()
    expected = NAMES[name](wide, -1)
    if x.shape[-1] == 0:
        assert torch.equal(out.double(), expected)
        return
    # Differences are below 16, and rounded: a relative error of 16 roundings in a sum of exponentials, and so an
    # absolute one in its logarithm. The sums have a few dozen additions one after another.
    magnitude = wide.abs().sum(-1) if name.endswith("_sum") else 1 + expected.abs()
    assert_within(out, expected, magnitude, roundings=96)


@each_op
@each_dtype
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 2500), of_x=layouts(), plan=PLANS)
@example(lead=(5,), N=1000, of_x=Layout("contiguous", 0), plan=ITS_OWN)
@example(lead=(2,), N=2000, of_x=Layout("contiguous", 0), plan=(4096, 2048))
@example(lead=(2,), N=0, of_x=Layout("contiguous", 0), plan=ITS_OWN)
def test_value(
    taken: ModuleType,
    name: str,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    plan: tuple[int, int],
) -> None:
    """The value is right for any length, layout and split."""
    N = N % 101 if plan == THREE else N
    x = of_x.make((*lead, N), dtype, DEVICE)
    with planned(taken, plan):
        out = guarded(getattr(taken, name), x)
        assert torch.equal(getattr(taken, name)(x), out)
    assert_value(name, x, out)


@each_dtype
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(1024, 2500), of_grad=layouts(), of_x=layouts(), plan=PLANS)
@example(lead=(5,), N=1000, of_grad=Layout("contiguous", 0), of_x=Layout("contiguous", 1), plan=ITS_OWN)
def test_gradient(
    taken: ModuleType,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_grad: Layout,
    of_x: Layout,
    plan: tuple[int, int],
) -> None:
    """The backward op is right for any gradient and any x, in any layout."""
    N = N % 101 if plan == THREE else N
    x = of_x.make((*lead, N), dtype, DEVICE)
    grad = of_grad.make(lead, result(dtype), DEVICE)
    y = torch.logsumexp(x.double(), -1).to(result(dtype))
    with planned(taken, plan):
        out = guarded(taken.few_long_rows_logsumexp_backward, grad, x, y)
        assert torch.equal(taken.few_long_rows_logsumexp_backward(grad, x, y), out)
    assert (out.dtype, out.shape) == (dtype, x.shape)
    assert out.is_contiguous()
    expected = grad.double()[..., None] * (x.double() - y.double()[..., None]).exp()
    assert_within(out, expected, expected.abs(), roundings=96, floor=torch.finfo(torch.float32).tiny)


@each_op
@each_dtype
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(64, 100), of_x=layouts(), of_grad=layouts(), plan=PLANS)
def test_autograd(
    taken: ModuleType,
    name: str,
    dtype: torch.dtype,
    lead: tuple[int, ...],
    N: int,
    of_x: Layout,
    of_grad: Layout,
    plan: tuple[int, int],
) -> None:
    """Through autograd a gradient is that of float64."""
    x = of_x.make((*lead, N), dtype, DEVICE)
    grad = of_grad.make(lead, result(dtype), DEVICE)
    wide = x.double().clone().requires_grad_()
    with planned(taken, plan):
        (out,) = torch.autograd.grad(getattr(taken, name)(x.requires_grad_()), x, grad)
    (expected,) = torch.autograd.grad(NAMES[name](wide, -1), wide, grad.double())
    assert (out.dtype, out.shape) == (dtype, x.shape)
    assert_within(out, expected, expected.abs(), roundings=256, floor=torch.finfo(torch.float32).tiny)


@each_dtype
@pytest.mark.parametrize("N", [5, 64, 1000, 1001])
def test_gradient_of_rows_apart(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """The backward reads rows with a gap between them where they are."""
    x = Layout("contiguous", 0).make((5, N + 16), dtype, DEVICE)[:, :N]
    y = taken.few_long_rows_logsumexp(x)
    out = guarded(taken.few_long_rows_logsumexp_backward, torch.ones_like(y), x, y)
    expected = torch.softmax(x.double(), -1)
    assert_within(out, expected, expected, roundings=256, floor=torch.finfo(torch.float32).tiny)


LENGTHS = [1, 5, 8, 1000, 4096, 8193, 16384, 16385, 32_768, 32_769, 50_257, 128_256, 201_088]


@each_op
@each_dtype
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, name: str, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, with a gap between them."""
    x = Layout("contiguous", N).make((3, N + 8), dtype, DEVICE)[:, 8:]
    assert_value(name, x, getattr(taken, name)(x))


@each_op
@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize(("plan", "N"), [(ITS_OWN, 1000), ((4096, 2048), 2001), (THREE, 100)], ids=str)
def test_same_bits_in_any_batch(
    taken: ModuleType, name: str, dtype: torch.dtype, plan: tuple[int, int], N: int
) -> None:
    """A row gives the same alone, in a batch of any size, at any place in it, and in a view."""
    op = getattr(taken, name)
    x = Layout("contiguous", 0).make((7, N), dtype, DEVICE)
    wide = torch.zeros(7, N + 17, dtype=dtype, device=DEVICE)
    wide[:, 3 : N + 3] = x
    with planned(taken, plan):
        whole = op(x)
        for batch in (x[:1], x[1:2], x[4:], x[::3], x[2:3].expand(5, N), wide[:, 3 : N + 3], x[None, 3:5], x[6]):
            rows = [i for row in batch.reshape(-1, N) for i in range(7) if torch.equal(row, x[i])]
            assert torch.equal(op(batch).flatten(), whole[rows])


@each_op
@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [4096, 16_385, 50_257, 128_256])
def test_same_bits_on_a_gpu(taken: ModuleType, name: str, dtype: torch.dtype, N: int) -> None:
    """As above, where threads share a row; and with torch.compile."""
    op = getattr(taken, name)
    x = torch.randn(64, N, device=DEVICE).to(dtype)
    wide = torch.empty(64, N + 16 - N % 16, dtype=dtype, device=DEVICE)
    wide[:, :N] = x
    whole = op(x)
    for rows in (slice(1), slice(1, 2), slice(3, 20), slice(63, 64), slice(None, None, 7)):
        for view in (x, wide[:, :N], wide.roll(1, 1)[:, 1 : N + 1]):
            assert torch.equal(op(view[rows]), whole[rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_plans(taken: ModuleType, dtype: torch.dtype) -> None:
    """How a row is split follows from its length and dtype; elements are loaded 16 bytes at a time, or one by one."""
    size, vec = max(4, dtype.itemsize), 16 // dtype.itemsize
    for N in (*range(1, 20_000, 97), *LENGTHS, 2**20, 2**24):
        plan = taken._few_long_rows_plan(N, dtype)
        assert plan["VEC"] == (vec if N % vec == 0 else 1)
        if N * size <= 128 * 1024:
            assert plan["BLOCK"] // 2 < N <= plan["BLOCK"]
        else:
            assert plan["BLOCK"] * size == taken.FEW_LONG_ROWS_PART
        assert 4 <= plan["num_warps"] <= 32
        assert plan["BLOCK"] * size <= 32 * 128 * plan["num_warps"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_copies_only_what_it_must(taken: ModuleType, dtype: torch.dtype) -> None:
    """Rows that begin at multiples of 16 bytes, or have an odd length, are read where they are."""
    x = torch.zeros(6, 64, dtype=dtype, device=DEVICE)
    for view in (x, x[:, :33], x[:, 1:34], x[::2], x[:, 16:48], x[1:].view(-1), x[0].expand(5, 64)):
        assert taken._few_long_rows_matrix(view).data_ptr() == view.data_ptr()
    for view in (x.T, x[:, ::2], x[:, 1:33], x.view(-1)[: 5 * 65].view(5, 65)[:, :48]):
        copy = taken._few_long_rows_matrix(view)
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x = Layout("contiguous", 0).make((3, 1001), dtype, DEVICE)
    with planned(taken, (4096, 2048)):
        for name in NAMES:
            assert torch.equal(at_cuda(getattr(taken, name), x), getattr(taken, name)(x))
        y = taken.few_long_rows_logsumexp(x)
        d = taken.few_long_rows_logsumexp_backward(y, x, y)
        assert torch.equal(at_cuda(taken.few_long_rows_logsumexp_backward, y, x, y), d)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, again and again, and the counters are left at zero."""
    for N in (5, 8192, 20_001):
        x = torch.randn(3, N, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE)
        expected = x.double().sum(-1)
        for step, kernel in recipe.STEPS.values():
            for _ in range(2):
                assert_within(step(x), expected, x.double().abs().sum(-1), roundings=96)
            assert recipe.statements(kernel) <= 25
        assert not recipe.COUNTS.any()
        for tile in ((2048, 4), (16384, 16)):
            assert_within(recipe.with_part(x, *tile), expected, x.double().abs().sum(-1), roundings=96)
    assert recipe.changed(recipe.two_passes, x) == 0
    assert recipe.statements(recipe.row_kernel) == 7


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = torch.ones(5, device=DEVICE)
    y = torch.ones((), device=DEVICE)
    with Guard() as guard:
        outputs = [getattr(taken, name)(x) for name in NAMES]
        outputs.append(taken.few_long_rows_logsumexp_backward(y, x, y))
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in outputs} <= guards


@each_op
@pytest.mark.parametrize("plan", [ITS_OWN, (32, 16)], ids=str)
def test_gradcheck(taken: ModuleType, name: str, plan: tuple[int, int]) -> None:
    """Differences agree with the gradient, in one part and in several."""
    x = Layout("contiguous", 0).make((2, 9), torch.float64, DEVICE).requires_grad_()
    with planned(taken, plan):
        assert torch.autograd.gradcheck(getattr(taken, name), x)


def test_gradient_of_gradient(taken: ModuleType) -> None:
    """The sum's is zero; that of the log-sum-exp is refused."""
    x = Layout("contiguous", 0).make((3, 7), torch.float64, DEVICE).requires_grad_()
    assert torch.autograd.gradgradcheck(taken.few_long_rows_sum, x)
    (d,) = torch.autograd.grad(taken.few_long_rows_logsumexp(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


@each_op
@each_dtype
@pytest.mark.parametrize("plan", [ITS_OWN, (1024, 512)], ids=str)
def test_special_values(taken: ModuleType, name: str, dtype: torch.dtype, plan: tuple[int, int]) -> None:
    """NaN, infinities and the lowest and highest numbers do what they do in PyTorch, and to no other row."""
    large = torch.finfo(dtype).max / 4
    x = torch.zeros(12, 300, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, 299], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :200], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7, 3], x[8, 1], x[8, 200], x[9] = -large, large, -large, -100
    for part in (x, x[:, :5], x[:, 100:]):
        with planned(taken, plan):
            out = getattr(taken, name)(part)
        expected = NAMES[name](part.to(result(dtype)), -1)
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@each_dtype
def test_special_gradients(taken: ModuleType, dtype: torch.dtype) -> None:
    """Infinities and NaN have the gradients that they have in PyTorch."""
    x = torch.zeros(5, 40, dtype=result(dtype), device=DEVICE)
    x[0, 5], x[1, 3], x[2], x[3, 1:], x[4, 0] = torch.nan, torch.inf, -torch.inf, -torch.inf, 100
    found = []
    for op in (taken.few_long_rows_logsumexp, partial(torch.logsumexp, dim=-1)):
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(op(leaf).sum(), leaf)
    torch.testing.assert_close(*found, equal_nan=True)


@each_dtype
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    for N in (5001, 40_001):
        ones = torch.ones(2, N, dtype=dtype, device=DEVICE)
        assert (taken.few_long_rows_sum(ones) == N).all()
        expected = torch.logsumexp(ones.double(), -1).to(result(dtype))
        torch.testing.assert_close(taken.few_long_rows_logsumexp(ones), expected)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x, y = torch.ones(2, 3, device=DEVICE), torch.ones(2, device=DEVICE)
    backward = taken.few_long_rows_logsumexp_backward
    for op in (taken.few_long_rows_sum, taken.few_long_rows_logsumexp, lambda x: backward(x, x, x)):
        with pytest.raises(TypeError, match=r"^few_long_rows takes a float tensor, not torch\.int32"):
            op(x.int())
        with pytest.raises(ValueError, match=r"^few_long_rows takes a tensor with a last dimension"):
            op(x[0, 0])
    for grad, of_y in ((y[:1], y), (y, x), (y.double(), y), (y, y.half())):
        with pytest.raises(ValueError, match=r"^few_long_rows_logsumexp_backward takes .*float32 and shape \(2,\)"):
            backward(grad, x, of_y)


@pytest.mark.needs_gpu_memory(15)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (33, 2**26), (1, 2**31 + 2**16), (1, 2**31 + 2**16 + 1)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements, in many rows and in one: the last elements count."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 200
    out = taken.few_long_rows_sum(x)
    assert out[-1] == 200
    assert not out[:-1].any()
    y = taken.few_long_rows_logsumexp(x)
    assert y[-1] == 200
    d = taken.few_long_rows_logsumexp_backward(torch.ones_like(y), x, y)
    assert d[-1, -1] == 1
    assert not d[-1, :-1].any()


@each_op
@each_dtype
@settings(max_examples=8)
@given(M=st.integers(1, 6), N=sizes(1024, 2500), seed=st.integers(0, 2**31), plan=PLANS)
@example(M=3, N=2000, seed=0, plan=(4096, 2048))
def test_counters(
    taken: ModuleType, name: str, dtype: torch.dtype, M: int, N: int, seed: int, plan: tuple[int, int]
) -> None:
    """One launch with counters gives what passes give, and leaves the counters at zero."""
    N = N % 101 if plan == THREE else N
    x = Layout("contiguous", seed).make((M, N), dtype, DEVICE)
    launch = partial(taken._few_long_rows_launch, x, name.endswith("exp"), taken._few_long_rows_kernel)
    count = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with planned(taken, plan):
        passes = launch()
        for _ in range(2):
            assert torch.equal(launch(count), passes)
            assert not count.any()
    assert_value(name, x, passes)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launches(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short row is one launch, a long one too with counters; without, or for too many rows, it is two or three."""
    blocks: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, PARTS, BLOCK, **options: blocks.append(PARTS or BLOCK)

    count = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    found = {}
    for M, N in ((1, 100), (1, 32_768), (4, 40_000), (5, 40_000), (1, 2**29)):
        for counts in (None, count):
            blocks.clear()
            x = torch.zeros((), dtype=dtype, device=DEVICE).expand(M, N)
            monkeypatch.setattr(taken, "_few_long_rows_matrix", lambda x: x)
            taken._few_long_rows_launch(x, False, Kernel(), counts)
            found[M, N, counts is None] = list(blocks)
    assert found == {
        (1, 100, True): [128],
        (1, 100, False): [128],
        (1, 32_768, True): [32_768],
        (1, 32_768, False): [32_768],
        (4, 40_000, True): [8192, 8],
        (4, 40_000, False): [8],
        (5, 40_000, True): [8192, 8],
        (5, 40_000, False): [8192, 8],
        (1, 2**29, True): [8192, 8192, 8],
        (1, 2**29, False): [8192, 8],
    }


@needs_a_gpu
@each_op
def test_counters_on_a_gpu(taken: ModuleType, name: str) -> None:
    """With counters and without, on two streams and in a CUDA graph: the same bits."""
    op, x = getattr(taken, name), torch.randn(64, 201_088, device=DEVICE).bfloat16()
    passes = taken._few_long_rows_launch(x, name.endswith("exp"), taken._few_long_rows_kernel)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(op(x))
    torch.cuda.synchronize()
    assert all(torch.equal(out, passes) for out in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, passes)


@needs_a_gpu
@each_dtype
@pytest.mark.parametrize("N", [5, 40_000])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """All ops pass the whole of opcheck, in one part and in several."""
    x = torch.randn(7, N, device=DEVICE).to(dtype)
    y = torch.randn(7, device=DEVICE, dtype=result(dtype))
    assert set(torch.library.opcheck(taken.few_long_rows_logsumexp_backward, (y, x, y)).values()) == {"SUCCESS"}
    for name in NAMES:
        leaf = x.clone().requires_grad_()
        assert set(torch.library.opcheck(getattr(taken, name), (leaf,)).values()) == {"SUCCESS"}


@needs_a_gpu
@each_op
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, name: str, dynamic: bool) -> None:
    """torch.compile takes the ops, their gradients, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: getattr(taken, name)(x * 2), fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (2, 40_000), (3, 40_001)):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        y, expected = compiled(x), NAMES[name](x * 2, -1)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (y, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The ops run where their input is, whichever GPU is the current one."""
    x = torch.randn(5, 40_000, device="cuda:1", requires_grad=True)
    for name, reference in NAMES.items():
        y = getattr(taken, name)(x)
        torch.testing.assert_close(y, reference(x, -1), rtol=1e-4, atol=1e-2)
        (d,) = torch.autograd.grad(y.sum(), x)
        assert d.isfinite().all()


OF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
OTHERS = {"part_ptr": "fp32", "out_ptr": "fp32", "count_ptr": "i32"}


def layouts_of_rows(taken: ModuleType) -> dict[tuple[str, int], set[tuple[str, ...]]]:
    """Return which thread holds what, and how wide loads are, for all that a launch may note of its arguments."""
    found: dict[tuple[str, int], set[tuple[str, ...]]] = {}
    kernel = taken._few_long_rows_kernel
    for dtype, N in itertools.product((torch.bfloat16, torch.float32), (100_000, 100_001)):
        plan = taken._few_long_rows_plan(N, dtype) | {"LOG": True, "PARTS": 16} | OTHERS
        for noted in ([], ["stride_xm"], ["parts"], ["stride_xm", "parts"]):
            multiples = [*noted, *(["N"] if N % 16 == 0 else [])]
            one = compiled(kernel, OF[dtype], multiples=multiples, **plan)
            what = (*re.findall(r"#blocked\d* = .*", one.asm["ttgir"]), *re.findall(r"ld\.global\S*", one.asm["ptx"]))
            found.setdefault((OF[dtype], N), set()).add(what)
    return found


def test_layout_is_that_of_any_batch(gallery: Path, on_h100: Ask) -> None:
    """Which thread holds what of a row, and so the order of its sum, follows from its length and dtype alone."""
    (found,) = on_h100(gallery / "fusion" / "few_long_rows.py", layouts_of_rows)
    assert {len(what) for what in found.values()} == {1}
    for (_, N), what in found.items():
        (loads,) = ({load for load in one if load.startswith("ld")} for one in what)
        assert ("ld.global.v4.b32" in loads) == (N == 100_000)


def layouts_of_parts(taken: ModuleType) -> list[tuple[list[str], list[str]]]:
    """Return which thread holds what of the parts, in a launch with counters and in a second pass."""
    found = []
    for parts in (16, 100, 2048):
        N = 8192 * parts
        plan = taken._few_long_rows_plan(N, torch.bfloat16) | {
            "LOG": False,
            "PARTS": taken.triton.next_power_of_2(parts),
        }
        known = ["N", "stride_xm", *(["parts"] if parts % 16 == 0 else [])]
        one = compiled(taken._few_long_rows_kernel, "bf16", multiples=known, **plan, **OTHERS)
        again = plan | {"VEC": 1, "BLOCK": plan["PARTS"], "PARTS": 0}
        multiples = ["N", "stride_xm"] if parts % 16 == 0 else []
        two = compiled(taken._few_long_rows_kernel, "fp32", multiples=multiples, **again, **OTHERS)
        texts = [kernel.asm["ttgir"] for kernel in (one, two)]
        named = [dict(re.findall(r"(#blocked\d*) = (.*)", text)) for text in texts]
        reduced = [re.findall(rf"tensor<{again['BLOCK']}xf32, (#blocked\d*)>\) -> f32", text) for text in texts]
        found.append(tuple([names[one] for one in which] for names, which in zip(named, reduced, strict=True)))
    return found


def test_parts_are_summed_alike(gallery: Path, on_h100: Ask) -> None:
    """With counters or without: which thread holds what of the parts is the same."""
    (found,) = on_h100(gallery / "fusion" / "few_long_rows.py", layouts_of_parts)
    for with_counters, second_pass in found:
        assert with_counters == second_pass
        assert len(second_pass) == 1


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, with every plan."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for N in (100, 4096, 4095, 8192, 16384, 16383, 32_768, 32_767, 100_000, 100_001):
            plan = taken._few_long_rows_plan(N, dtype)
            of = {"dtype": OF[dtype], **plan}
            wide = {name: OF[result(dtype)] for name in ("out_ptr", "g_ptr", "y_ptr")}
            most = taken.FEW_LONG_ROWS_PART // max(4, dtype.itemsize)
            for log, parts in ((False, 0), (True, 0), (True, 0 if plan["BLOCK"] != most else most)):
                options = {"part_ptr": wide["out_ptr"], "out_ptr": wide["out_ptr"], "count_ptr": "i32"}
                options |= {"LOG": log, "PARTS": parts}
                found[f"{dtype} {N} {log} {parts}"] = stack(taken._few_long_rows_kernel, **of, **options)
            options = {name: wide[name] for name in ("g_ptr", "y_ptr")}
            of |= taken._few_long_rows_plan_backward(N, dtype)
            found[f"{dtype} {N} backward"] = stack(taken._few_long_rows_backward_kernel, **of, **options)
    return found


@pytest.mark.thorough
def test_registers_do_not_spill(gallery: Path, on_h100: Ask) -> None:
    """With any length and dtype."""
    (found,) = on_h100(gallery / "fusion" / "few_long_rows.py", spills)
    assert len(found) > 3 * 10 * 3
    assert {name: bytes_ for name, bytes_ in found.items() if bytes_} == {}


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of a short row and of a long one."""
    op = recipe.few_long_rows_logsumexp
    return [graphs(op, torch.randn(3, N, requires_grad=True)) for N in (300, 40_001)]


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way."""
    (found,) = on_h100(gallery / "fusion" / "few_long_rows.py", traced)
    for (forward, backward), launches in zip(found, (1, 2), strict=True):
        for graph, count in ((forward, launches), (backward, 1)):
            kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
            assert kernels == ["triton_kernel_wrapper_functional"] * count
            assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/few_long_rows")
    once, six, error, by_programs, two_passes, scalar, integers = out.splitlines()
    assert once.startswith("1.00 times")
    assert six.startswith("6.00 times")
    assert re.fullmatch(r"largest error \d\.\de-\d\d of the terms, allowed 1\.0e-06", error)
    assert re.match(r"by_programs: [1-8] of 8 rows", by_programs)
    assert two_passes.startswith("two_passes: 0 of 8 rows")
    assert scalar.startswith("ValueError: few_long_rows takes")
    assert integers.startswith("TypeError: few_long_rows takes")


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("few_long_rows_sum", lambda normal, M, N: (normal(M, N),), lambda x: torch.sum(x, -1)),
    ("few_long_rows_sum", lambda normal, M, N: (normal(M // 5, 300 * N),), lambda x: torch.sum(x.double(), -1).float()),
    ("few_long_rows_logsumexp", lambda normal, M, N: (normal(M // 5, 300 * N),), lambda x: torch.logsumexp(x, -1)),
    (
        "few_long_rows_logsumexp_backward",
        lambda normal, M, N: (normal(M), normal(M, N), normal(M) + 9),
        lambda g, x, y: g[:, None] * (x - y[:, None]).exp(),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a load without a mask", "tl.load(x_ptrs, mask=offs < N, other=OTHER)", "tl.load(x_ptrs)"),
    ("zeros past the end of a log-sum-exp", '-float("inf") if LOG else 0.0', "0.0"),
    ("infinity minus infinity", '        top = tl.where(tl.abs(top) == float("inf"), 0.0, top)\n', ""),
    ("half an accumulator", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("rows taken for adjacent", "x_ptrs = x_ptr + row * stride_xm", "x_ptrs = x_ptr + row * N"),
    ("rows taken for adjacent, backward", "tl.load(x_ptr + row * stride_xm + offs", "tl.load(x_ptr + row * N + offs"),
    ("partial sums in half precision", "x.new_empty((M, parts), dtype=dtype)", "x.new_empty((M, parts)).half()"),
    (
        "counters that go on",
        "            tl.store(count_ptr + row, 0)\n\n\n@triton.jit\ndef _few",
        "\n\n@triton.jit\ndef _few",
    ),
    ("more rows than counters", " and count.numel() >= M\n", "\n"),
    (
        "a split by the number of rows",
        '        parts = triton.cdiv(N, plan["BLOCK"])\n        to',
        '        plan["BLOCK"] = max(2, plan["BLOCK"] // triton.next_power_of_2(M))\n'
        '        parts = triton.cdiv(N, plan["BLOCK"])\n        to',
    ),
    ("vectors that depend on more than the length", "VEC if N % VEC == 0 else 1", "math.gcd(N, VEC)"),
    ("rows that begin elsewhere", " or x.storage_offset() % VEC\n", "\n"),
    ("rows that lie elsewhere", "int(x.stride(0)) % VEC or ", ""),
    ("an empty row that is zero", "-math.inf if LOG else 0)", "0)"),
    ("gradient stored without a mask", "g * tl.exp(x - y), mask=mask)", "g * tl.exp(x - y))"),
    (
        "no launcher of sums for GPUs",
        'FEW_LONG_ROWS_LIBRARY.impl(\n    "few_long_rows_sum",\n',
        'FEW_LONG_ROWS_LIBRARY.impl(\n    "few_long_rows_logsumexp",\n',
    ),
]
