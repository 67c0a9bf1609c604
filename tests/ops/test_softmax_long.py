"""The op of the recipe Softmax of long rows and its gradient, with every plan of their launcher."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from case import Case, Draw, Refused, check
from compiled import Ask, graphs, ptx
from hypothesis import given
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes
from softmaxes import exact, exact_gradient, gradient_and_rows, of_rows


@contextmanager
def planned(taken: ModuleType, plan: tuple[int, ...]) -> Iterator[None]:
    """Have the launcher decide as if registers and cache were of other sizes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings(*plan).items():
            patch.setattr(taken, name, value)
        yield


def settings(whole: int, cache: int, few: int = 2**31) -> dict[str, object]:
    """Return what the launcher's decisions are set to: what registers hold, what the cache holds, what is shared."""
    return {"SOFTMAX_LONG_WHOLE": whole, "_softmax_long_gpu": lambda _: (16, 4 * cache), "SOFTMAX_LONG_FEW": few}


def special(draw: Draw) -> list[tuple[torch.Tensor]]:
    """Make rows that registers hold, and others, with a NaN, infinities, and the lowest and highest numbers."""
    large = torch.finfo(draw.dtype).max
    parts = []
    for N in (9000, 9001):
        x = torch.zeros(12, N, dtype=draw.dtype, device=DEVICE)
        x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
        x[3], x[4, :8000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
        x[7], x[8, 1::2], x[9], x[10, 0] = -large, -large, large, large
        parts += [(x,), (x[:, :5],), (x[:, 4000:],)]
    return parts


LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
SHAPES = st.tuples(LEADS, sizes(1024, 4500)).map(lambda drawn: (*drawn[0], drawn[1]))
# Lengths for tiles in registers, and for eight to one program for each multiprocessor of a GPU.
ROWS = [(17, 5), (3, 1), (2, 8193), (3, 3000), (0, 7), (2, 16_392), (2, 20_001), (3, 0)]
ROWS += [(2048 // N + 1, N) for N in (2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1000, 1024)]
ROWS += [(2, N) for N in (2048, 4096, 8192, 16384, 32_000, 80_000, 150_001)] + [(5, 20_001)]
# Edges alone, blocks that are full, and those that are not.
PASSES = [(3, 101), (2, 2048), (5, 1), (2, 4099), (0, 7), (5, 17), (2, 4096), (2, 1024), (2, 1025), (2, 2049)]
# The exponent is less than 16 and is rounded: 16 roundings in an exponential and in their sum, and the sums have a few
# dozen additions one after another. What is no normal number in the accumulator may be zero.
FLUSHED = {dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).tiny for dtype in FLOATS}
OF_BOTH = {"small": (2, 5), "shapes": SHAPES, "roundings": 96, "floor": FLUSHED.__getitem__}
FORWARD = Case(
    "softmax_long",
    of_rows,
    exact,
    autocast=torch.float32,
    sizes=ROWS,
    reference=lambda x: torch.softmax(x, -1),
    special=special,
    gradients=lambda grad, x: exact_gradient(grad, torch.softmax(x, -1)),
    refused=[
        Refused(lambda draw: (draw(2, 3).int(),), TypeError, r"softmax_long takes a float tensor, not torch\.int32"),
        Refused(lambda draw: (draw(1).expand(2**30 + 1),), ValueError, r"softmax_long takes .* up to 2\*\*30 elements"),
    ],
    **OF_BOTH,
)
BACKWARD = Case(
    "softmax_long_backward",
    gradient_and_rows,
    exact_gradient,
    sizes=ROWS,
    refused=[
        Refused(
            lambda draw: (draw(3).int(),) * 2,
            TypeError,
            r"softmax_long_backward takes a float tensor, not torch\.int32",
        ),
        Refused(
            lambda draw: (draw(1).expand(2**30 + 1),) * 2,
            ValueError,
            r"softmax_long_backward takes .* up to 2\*\*30 elements",
        ),
        Refused(
            lambda draw: (draw(3), draw(2, 3)),
            ValueError,
            r"softmax_long_backward takes .*, not .*\(3,\).* for .*\(2, 3\)",
        ),
        Refused(lambda draw: (draw(3).double(), draw(3)), ValueError, r".*torch\.float64.*torch\.float32"),
    ],
    **OF_BOTH,
)
CONTRACT = [
    FORWARD,
    BACKWARD,
    # Short rows in two passes, with many programs for each multiprocessor of a GPU, and with one.
    *(
        replace(case, name=f"{case.call} in passes", sizes=PASSES, settings=settings(0, 2**20), refused=())
        for case in (FORWARD, BACKWARD)
    ),
    *(
        replace(
            case,
            name=f"{case.call} of one program",
            sizes=PASSES,
            shapes=None,
            dtypes=[torch.float32],
            settings=settings(0, 0),
            special=None,
            refused=(),
        )
        for case in (FORWARD, BACKWARD)
    ),
    # Rows that programs share: one block, some, an odd length, and more blocks than programs
    *(
        replace(
            case,
            name=f"{case.call} in parts",
            sizes=[(1, 1), (3, 101), (2, 2048), (2, 4099), (0, 7), (3, 8193), (2, 40_000)],
            settings=settings(0, 2**20, few=0) | {"SOFTMAX_LONG_PART": 2048},
            refused=(),
        )
        for case in (FORWARD, BACKWARD)
    ),
]


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for what the page says: rows that fit, and programs whose rows the cache holds."""
    fits = taken._softmax_long_fits
    assert all(fits(N, N, 4) == (N <= 2048 or N % 4 == 0) for N in range(1, 16385, 61))
    assert [fits(N, N, 2) for N in (8192, 8200)] == [True, False]
    assert [fits(N, N, 8) for N in (8192, 8194)] == [True, False]
    lengths = 8192, 8200, 12288, 12296, 16384, 16392
    assert [fits(N, N, 2, backward=True) for N in lengths] == [True, False, False, True, True, False]
    assert [fits(4096, stride, 2) for stride in (4096, 4104, 4100)] == [True, True, False]
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


@given(M=st.integers(1, 200), N=st.integers(1, 600_000), dtype=st.sampled_from(FLOATS))
def test_plan_of_parts(taken: ModuleType, M: int, N: int, dtype: torch.dtype) -> None:
    """Few long rows have programs for all 132 multiprocessors, if there are as many blocks; others have no parts."""
    x = torch.empty(1, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "_softmax_long_gpu", lambda _: (132, 2**20))
        grid, options, most = taken._softmax_long_parts_plan(x, M, N, N)
    shared = M <= 33 and N * x.element_size() > taken.SOFTMAX_LONG_FEW
    assert (grid is not None) == shared
    if grid is not None:
        rows, parts = grid
        wanted = taken.SOFTMAX_LONG_EACH * 132
        assert (rows, parts <= most < 2 * wanted) == (M, True)
        assert parts == -(-N // options["BLOCK_N"]) or M * (parts - 1) < wanted <= M * parts


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
        check(FORWARD, taken, dtype, (row,))


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


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, dtype: torch.dtype, N: int, stride: int) -> list[tuple[object, dict[str, object]]]:
    """Return both kernels of long rows, each with what is known of its arguments at a launch."""
    x, type_name = torch.empty(1, dtype=dtype), NAMES[str(dtype).removeprefix("torch.")]
    kernels = taken._softmax_long_kernel, taken._softmax_long_backward_kernel
    plans = [taken._softmax_long_plan(x, 1000, N, stride, tensors)[1] for tensors in (1, 2)]
    return [(kernel, {"dtype": type_name, **plan}) for kernel, plan in zip(kernels, plans, strict=True)]


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


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Bodies are loaded 16 bytes at a time; tl.exp2 keeps nothing below the normal numbers; float64 stays float64."""
    access_widths, single = on_h100(gallery / "fusion" / "softmax_long.py", widths, exponentials)
    alike, others = access_widths
    assert alike == [{"v4.b32", "b16"}] * 2
    assert others[0] == {"b16"}
    assert single == [{"ex2.approx.ftz.f32"}, set()]


def traced(recipe: ModuleType) -> list[list[list[str]]]:
    """Return the graphs of rows that stay in registers, of long ones, and of few that programs share."""
    shapes = (3, 300), (5, 20_001), (3, 20_001)
    return [graphs(recipe.softmax_long, torch.randn(shape, requires_grad=True)) for shape in shapes]


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Neither input counts as written, either way: a store's address must not depend on them."""
    (traced_graphs,) = on_h100(gallery / "fusion" / "softmax_long.py", traced)
    for count, graph in ((n, graph) for both, n in zip(traced_graphs, (1, 1, 2), strict=True) for graph in both):
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"] * count
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]
        assert count > 1 or graph.count("<built-in function getitem>") == 1


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("short rows stored without a mask", "offs_m * N + offs_n, y, mask=mask)", "offs_m * N + offs_n, y)"),
    (
        "short rows behind the last",
        "and the same values are stored.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "and the same values are stored.\n",
    ),
    (
        "a short row padded with zeros",
        'tl.load(x_ptrs, mask=mask, other=-float("inf"))',
        "tl.load(x_ptrs, mask=mask, other=0)",
    ),
    ("rows taken for adjacent", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    ("long rows taken for adjacent", "x_ptr, row * stride_xm, N, VEC", "x_ptr, row * N, N, VEC"),
    ("a sum that is not corrected", "    s *= _softmax_long_exp(m - larger)\n", ""),
    ("many rows shared", "SOFTMAX_LONG_PROCESSORS = 4", "SOFTMAX_LONG_PROCESSORS = 1"),
    ("rows of a gradient in two passes", "SOFTMAX_LONG_AGAIN = 48 * 1024", "SOFTMAX_LONG_AGAIN = 64 * 1024"),
    ("parts over each other", "begin, tl.minimum(begin + span, N)", "begin, N"),
    (
        "sums of parts that are not corrected",
        "total = tl.sum(s * _softmax_long_exp(m - top), axis=0)\n    for start in range(begin",
        "total = tl.sum(s, axis=0)\n    for start in range(begin",
    ),
    ("parts of the first row", "at, mask = row * parts + offs_p,", "at, mask = offs_p,"),
    (
        "the first part's products",
        "s_ptr + row * parts + offs_p, mask=offs_p < parts",
        "s_ptr + row * parts + 0 * offs_p, mask=offs_p < parts",
    ),
    (
        "vectors across rows in parts",
        '"VEC": math.gcd(N, stride, 16 // size),\n        "BLOCK_N": BLOCK',
        '"VEC": math.gcd(stride, 16 // size),\n        "BLOCK_N": BLOCK',
    ),
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
        '"VEC": math.gcd(N, stride, 16 // size),\n        "M": M',
        '"VEC": math.gcd(stride, 16 // size),\n        "M": M',
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
