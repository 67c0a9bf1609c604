"""The ops of the recipe Few long rows: values, gradients, and the same bits in any batch."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator
from compiled import Ask, compiled, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, first_quickly, sizes
from tolerance import assert_within

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

each_op = pytest.mark.parametrize("name", ["few_long_rows_sum", "few_long_rows_logsumexp"])
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# Bytes of a row that is one part, and of a part.
ITS_OWN = (128 * 1024, 32 * 1024)
THREE = (32, 16)  # passes, from 17 elements on in float64 and from 33 in the others


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, int]) -> Iterator[None]:
    """Have the launcher split rows in another way."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings(*plan).items():
            patch.setattr(taken, name, value)
        taken._few_long_rows_plan.cache_clear()
        yield
    taken._few_long_rows_plan.cache_clear()


def result(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the results."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def settings(whole: int, part: int) -> dict[str, int]:
    """Return how the launcher splits rows: the bytes of a row that is one part, and of a part."""
    return {"FEW_LONG_ROWS_WHOLE": whole, "FEW_LONG_ROWS_PART": part}


def of_rows(draw: Draw, *shape: int) -> tuple[torch.Tensor]:
    """Make rows."""
    return (draw(*shape),)


def of_backward(draw: Draw, *shape: int) -> tuple[torch.Tensor, ...]:
    """Make a gradient, rows and their log-sum-exp."""
    result_dtype = result(draw.dtype)
    grad, x = draw(*shape[:-1], dtype=result_dtype), draw(*shape)
    return grad, x, draw(*shape[:-1], dtype=result_dtype, of=lambda _: torch.logsumexp(x.double(), -1))


def exact_sum(x: torch.Tensor) -> list[Exact]:
    """Return the sums of rows."""
    return [Exact(x.sum(-1), x.abs().sum(-1), dtype=accumulator)]


def exact_logsumexp(x: torch.Tensor) -> list[Exact]:
    """Return the log-sum-exp of rows."""
    y = torch.logsumexp(x, -1)
    return [Exact(y, 1 + y.abs(), dtype=accumulator)]


def exact_gradient(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[Exact]:
    """Return the gradient of rows, given their log-sum-exp."""
    return [Exact(grad[..., None] * (x - y[..., None]).exp())]


def special(draw: Draw) -> list[tuple[torch.Tensor]]:
    """Make rows with a NaN, infinities, and low and high numbers."""
    large = torch.finfo(draw.dtype).max / 4
    x = torch.zeros(12, 300, dtype=draw.dtype, device=DEVICE)
    x[0, 5], x[1, 299], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :200], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7, 3], x[8, 1], x[8, 200], x[9] = -large, large, -large, -100
    return [(x,), (x[:, :5],), (x[:, 100:],)]


def shapes(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with rows of up to so many elements."""
    return st.tuples(LEADS, sizes(1024, most)).map(lambda drawn: (*drawn[0], drawn[1]))


# Lengths of one part and of several, of which 16 bytes divide a row or not.
ROWS = [(5, 1000), (2, 0), (3, 1), (3, 40_001), (0, 7), (3, 1001), (2, 32_769), (2, 8193)]
ROWS += [(2, N) for N in (5, 8, 4096, 16384, 16385, 32_768, 50_257, 128_256, 201_088)]
PARTS = [(2, 2000), (5, 300), (3, 2001), (2, 257), (2, 256), (1, 1025), (0, 7), (3, 128)]
PASSES = [(2, 100), (5, 33), (3, 17), (4, 7), (1, 8), (0, 5), (1, 65), (2, 64)]
REFUSED = [
    Refused(lambda draw: (draw(2, 3).int(),), TypeError, r"few_long_rows takes a float tensor, not torch\.int32"),
    Refused(lambda draw: (draw(),), ValueError, "few_long_rows takes a tensor with a last dimension"),
]
# Differences are below 16, and rounded: a relative error of 16 roundings in a sum of exponentials, and so an absolute
# one in its logarithm. The sums have a few dozen additions one after another.
OF_ALL = {"sizes": ROWS, "small": (2, 9), "shapes": shapes(2500), "roundings": 96}
WHOLE = [
    Case(
        "few_long_rows_sum",
        of_rows,
        exact_sum,
        reference=lambda x: torch.sum(x.to(result(x.dtype)), -1),
        special=special,
        gradients=lambda grad, x: [Exact(grad[..., None].expand(x.shape))],
        second_gradients=True,
        refused=REFUSED,
        **OF_ALL,
    ),
    Case(
        "few_long_rows_logsumexp",
        of_rows,
        exact_logsumexp,
        reference=lambda x: torch.logsumexp(x.to(result(x.dtype)), -1),
        special=special,
        gradients=lambda grad, x: exact_gradient(grad, x, torch.logsumexp(x, -1)),
        refused=REFUSED,
        **OF_ALL,
    ),
    Case(
        "few_long_rows_logsumexp_backward",
        of_backward,
        exact_gradient,
        floor=lambda _: torch.finfo(torch.float32).tiny,
        refused=[
            *(entry._replace(arguments=lambda draw, entry=entry: entry.arguments(draw) * 3) for entry in REFUSED),
            *(
                Refused(make, ValueError, r"few_long_rows_logsumexp_backward takes .*float32 and shape \(2,\)")
                for make in (
                    lambda draw: (draw(1), draw(2, 3), draw(2)),
                    lambda draw: (draw(2), draw(2, 3), draw(2, 3)),
                    lambda draw: (draw(2).double(), draw(2, 3), draw(2)),
                    lambda draw: (draw(2), draw(2, 3), draw(2).half()),
                )
            ),
        ],
        **OF_ALL,
    ),
]
# As the launcher splits rows, in parts of short rows, and in three passes and more.
CONTRACT = [
    *WHOLE,
    *(
        replace(case, name=f"{case.call} in parts", sizes=PARTS, settings=settings(1024, 512), refused=())
        for case in WHOLE
    ),
    *(
        replace(
            case,
            name=f"{case.call} in three passes",
            sizes=PASSES,
            shapes=shapes(100),
            settings=settings(*THREE),
            special=None,
            many=(131, 1001),
            refused=(),
        )
        for case in WHOLE
    ),
]


LENGTHS = [1, 5, 8, 1000, 4096, 8193, 16384, 16385, 32_768, 32_769, 50_257, 128_256, 201_088]


@each_op
@pytest.mark.parametrize("dtype", first_quickly(torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize(("plan", "N"), [(ITS_OWN, 1000), ((4096, 2048), 2001), (THREE, 100)], ids=str)
def test_same_bits_in_any_batch(
    taken: ModuleType, name: str, dtype: torch.dtype, plan: tuple[int, int], N: int
) -> None:
    """A row gives the same alone, in a batch of any size, at any place in it, and in a view."""
    op = getattr(taken, name)
    x = Layout("contiguous", 0).make((7, N), dtype, DEVICE)
    padded = torch.zeros(7, N + 17, dtype=dtype, device=DEVICE)
    padded[:, 3 : N + 3] = x
    with planned(taken, plan):
        whole = op(x)
        for batch in (x[:1], x[1:2], x[4:], x[::3], x[2:3].expand(5, N), padded[:, 3 : N + 3], x[None, 3:5], x[6]):
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
    padded = torch.empty(64, N + 16 - N % 16, dtype=dtype, device=DEVICE)
    padded[:, :N] = x
    whole = op(x)
    for rows in (slice(1), slice(1, 2), slice(3, 20), slice(63, 64), slice(None, None, 7)):
        for view in (x, padded[:, :N], padded.roll(1, 1)[:, 1 : N + 1]):
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


@each_dtype
def test_special_gradients(taken: ModuleType, dtype: torch.dtype) -> None:
    """Infinities and NaN have the gradients that they have in PyTorch."""
    x = torch.zeros(5, 40, dtype=result(dtype), device=DEVICE)
    x[0, 5], x[1, 3], x[2], x[3, 1:], x[4, 0] = torch.nan, torch.inf, -torch.inf, -torch.inf, 100
    grads = []
    for op in (taken.few_long_rows_logsumexp, partial(torch.logsumexp, dim=-1)):
        leaf = x.clone().requires_grad_()
        grads += torch.autograd.grad(op(leaf).sum(), leaf)
    torch.testing.assert_close(*grads, equal_nan=True)


@each_dtype
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    for N in (5001, 40_001):
        ones = torch.ones(2, N, dtype=dtype, device=DEVICE)
        assert (taken.few_long_rows_sum(ones) == N).all()
        expected = torch.logsumexp(ones.double(), -1).to(result(dtype))
        torch.testing.assert_close(taken.few_long_rows_logsumexp(ones), expected)


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
@pytest.mark.parametrize(("plan", "M", "N"), [(ITS_OWN, 5, 1000), ((4096, 2048), 3, 2000), (THREE, 4, 100)], ids=str)
def test_counters(taken: ModuleType, name: str, dtype: torch.dtype, plan: tuple[int, int], M: int, N: int) -> None:
    """One launch with counters gives what passes give, and leaves the counters at zero."""
    x = Layout("contiguous", 0).make((M, N), dtype, DEVICE)
    launch = partial(taken._few_long_rows_launch, x, name.endswith("exp"), taken._few_long_rows_kernel)
    count = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with planned(taken, plan):
        passes = launch()
        for _ in range(2):
            assert torch.equal(launch(count), passes)
            assert not count.any()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launches(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short row is one launch, a long one too with counters; without, or for too many rows, it is two or three."""
    blocks: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, PARTS, BLOCK, **options: blocks.append(PARTS or BLOCK)

    count = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    results = {}
    for M, N in ((1, 100), (1, 32_768), (4, 40_000), (5, 40_000), (1, 2**29)):
        for counts in (None, count):
            blocks.clear()
            x = torch.zeros((), dtype=dtype, device=DEVICE).expand(M, N)
            monkeypatch.setattr(taken, "_few_long_rows_matrix", lambda x: x)
            taken._few_long_rows_launch(x, False, Kernel(), counts)
            results[M, N, counts is None] = list(blocks)
    assert results == {
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
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(op(x))
    torch.cuda.synchronize()
    assert all(torch.equal(out, passes) for out in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, passes)


OF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
OTHERS = {"part_ptr": "fp32", "out_ptr": "fp32", "count_ptr": "i32"}


def layouts_of_rows(taken: ModuleType) -> dict[tuple[str, int], set[tuple[str, ...]]]:
    """Return which thread holds what, and how wide loads are, for all that a launch may note of its arguments."""
    results: dict[tuple[str, int], set[tuple[str, ...]]] = {}
    kernel = taken._few_long_rows_kernel
    for dtype, N in itertools.product((torch.bfloat16, torch.float32), (100_000, 100_001)):
        plan = taken._few_long_rows_plan(N, dtype) | {"LOG": True, "PARTS": 16} | OTHERS
        for noted in ([], ["stride_xm"], ["parts"], ["stride_xm", "parts"]):
            multiples = [*noted, *(["N"] if N % 16 == 0 else [])]
            made = compiled(kernel, OF[dtype], multiples=multiples, **plan)
            code = (*re.findall(r"#blocked\d* = .*", made.asm["ttgir"]), *re.findall(r"ld\.global\S*", made.asm["ptx"]))
            results.setdefault((OF[dtype], N), set()).add(code)
    return results


def test_layout_is_that_of_any_batch(gallery: Path, on_h100: Ask) -> None:
    """Which thread holds what of a row, and so the order of its sum, follows from its length and dtype alone."""
    (results,) = on_h100(gallery / "fusion" / "few_long_rows.py", layouts_of_rows)
    assert {len(code) for code in results.values()} == {1}
    for (_, N), code in results.items():
        (loads,) = ({load for load in entry if load.startswith("ld")} for entry in code)
        assert ("ld.global.v4.b32" in loads) == (N == 100_000)


def layouts_of_parts(taken: ModuleType) -> list[tuple[list[str], list[str]]]:
    """Return which thread holds what of the parts, in a launch with counters and in a second pass."""
    results = []
    for parts in (16, 100, 2048):
        N = 8192 * parts
        plan = taken._few_long_rows_plan(N, torch.bfloat16) | {
            "LOG": False,
            "PARTS": taken.triton.next_power_of_2(parts),
        }
        known = ["N", "stride_xm", *(["parts"] if parts % 16 == 0 else [])]
        first = compiled(taken._few_long_rows_kernel, "bf16", multiples=known, **plan, **OTHERS)
        again = plan | {"VEC": 1, "BLOCK": plan["PARTS"], "PARTS": 0}
        multiples = ["N", "stride_xm"] if parts % 16 == 0 else []
        second = compiled(taken._few_long_rows_kernel, "fp32", multiples=multiples, **again, **OTHERS)
        texts = [kernel.asm["ttgir"] for kernel in (first, second)]
        named = [dict(re.findall(r"(#blocked\d*) = (.*)", text)) for text in texts]
        reduced = [re.findall(rf"tensor<{again['BLOCK']}xf32, (#blocked\d*)>\) -> f32", text) for text in texts]
        results.append(tuple([names[layout] for layout in which] for names, which in zip(named, reduced, strict=True)))
    return results


def test_parts_are_summed_alike(gallery: Path, on_h100: Ask) -> None:
    """With counters or without: which thread holds what of the parts is the same."""
    (results,) = on_h100(gallery / "fusion" / "few_long_rows.py", layouts_of_parts)
    for with_counters, second_pass in results:
        assert with_counters == second_pass
        assert len(second_pass) == 1


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of a short row and of a long one."""
    op = recipe.few_long_rows_logsumexp
    return [graphs(op, torch.randn(3, N, requires_grad=True)) for N in (300, 40_001)]


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way."""
    (traced_graphs,) = on_h100(gallery / "fusion" / "few_long_rows.py", traced)
    for (forward, backward), launches in zip(traced_graphs, (1, 2), strict=True):
        for graph, count in ((forward, launches), (backward, 1)):
            kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
            assert kernels == ["triton_kernel_wrapper_functional"] * count
            assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
