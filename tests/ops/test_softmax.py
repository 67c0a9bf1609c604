"""The op of the recipe Softmax and its gradient."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from case import Case, Draw, Refused
from compiled import Ask, graphs, ptx
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes
from softmaxes import exact, exact_gradient, gradient_and_rows, of_rows


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the op takes."""
    return 64 * 1024 // max(4, dtype.itemsize)


def special(draw: Draw) -> list[tuple[torch.Tensor]]:
    """Make rows of one block and two with a NaN, infinities, and the lowest and highest numbers."""
    large, N = torch.finfo(draw.dtype).max, 8001
    x = torch.zeros(12, N, dtype=draw.dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :7000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7], x[8, 1::2], x[9], x[10, 0] = -large, -large, large, large
    return [(part,) for part in (x, x[:, :5], x[:, 4000:], x[:, :1000], x[:, :5001], x[:, 3000:])]


def too_long(*dtypes: torch.dtype) -> Iterator[tuple[Callable[[Draw], torch.Tensor], str]]:
    """Yield, for each dtype, what makes a row that is too long, and what is said of it."""
    for dtype in dtypes:
        most = longest(dtype)
        text = rf"softmax takes .* {most} .*{dtype}, not {most + 1}: softmax_long"
        yield lambda draw, dtype=dtype, most=most: draw(1, dtype=dtype).expand(most + 1), text


LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# Lengths of one block and two, even and odd, of the longest tile and beside it, and of which 8 divides the length.
ROWS = [(3, 1), (17, 5), (3, 2560), (3, 3073), (0, 7), (9, 1000), (3, 6145), (2, 8191)]
ROWS += [(2049 // N + 1, N) for N in (2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1024)]
ROWS += [(3, N) for N in (2048, 2049, 3000, 4096, 4097, 5000, 5120, 6144, 8192, 8193, 10000, 12288, 12289, 16384)]
SHAPES = st.tuples(LEADS, sizes(1024, 4500)).map(lambda drawn: (*drawn[0], drawn[1]))
# The exponent is less than 16 and is rounded: 16 roundings in an exponential and in their sum, and the sums have a few
# dozen additions one after another. What is no normal number in the accumulator may be zero.
FLUSHED = {dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).tiny for dtype in FLOATS}
CONTRACT = [
    Case(
        "softmax",
        of_rows,
        exact,
        sizes=ROWS,
        small=(2, 5),
        in_layouts=(9, 1000),
        fits=lambda size, dtype: size[-1] <= longest(dtype),
        shapes=SHAPES,
        roundings=96,
        floor=FLUSHED.__getitem__,
        reference=lambda x: torch.softmax(x, -1),
        special=special,
        autocast=torch.float32,
        gradients=lambda grad, x: exact_gradient(grad, torch.softmax(x, -1)),
        refused=[
            Refused(lambda draw: (draw(2, 3).int(),), TypeError, r"softmax takes a float tensor, not torch\.int32"),
            *(Refused(lambda draw, make=make: (make(draw),), ValueError, text) for make, text in too_long(*FLOATS)),
        ],
    ),
    Case(
        "softmax_backward",
        gradient_and_rows,
        exact_gradient,
        sizes=ROWS,
        small=(2, 5),
        in_layouts=(9, 1000),
        fits=lambda size, dtype: size[-1] <= longest(dtype),
        shapes=SHAPES,
        roundings=96,
        floor=FLUSHED.__getitem__,
        refused=[
            Refused(lambda draw: (draw(3).int(),) * 2, TypeError, r"softmax takes a float tensor, not torch\.int32"),
            Refused(
                lambda draw: (draw(3), draw(2, 3)), ValueError, r"softmax_backward takes .*\(3,\).* for .*\(2, 3\)"
            ),
            Refused(lambda draw: (draw(3).double(), draw(3)), ValueError, r".*torch\.float64.*torch\.float32"),
            *(Refused(lambda draw, make=make: (make(draw),) * 2, ValueError, text) for make, text in too_long(*FLOATS)),
        ],
    ),
]


def test_plans(taken: ModuleType) -> None:
    """The launcher asks for tiles of 8 KB, one block or two, so many bytes to a thread."""
    for dtype in FLOATS:
        itemsize = max(4, dtype.itemsize)
        for N in (*range(1, longest(dtype), 61), longest(dtype)):
            plan = taken._softmax_plan(N, 3 * N, dtype)
            other = taken._softmax_plan(N, 3 * N, dtype, backward=True)
            whole = (1 << (N - 1).bit_length()) * itemsize // (32 * 128)
            block, rest = plan["BLOCK_N"], plan["REST"]
            tile, least = 8 * 1024, 4
            if 32 * plan["VEC"] < block <= 4 * 1024 // itemsize and plan["VEC"] * dtype.itemsize < 16:
                tile, least = 4 * 1024, 1 if block * itemsize <= 1024 else 2  # or all warps would share each row
            assert other == plan | {"num_warps": max(least, whole)}
            if rest:
                assert 2 * block * itemsize > 16 * 1024
                assert block < N <= block + rest
                assert rest // 2 < N - block
                assert rest <= block // 2
            else:
                assert block // 2 < N <= block
                assert block * itemsize <= 16 * 1024 or 3 * block < 4 * N
            assert plan["BLOCK_M"] * block * itemsize == max(tile, block * itemsize)
            held = plan["BLOCK_M"] * (block + rest) * itemsize / (32 * plan["num_warps"])
            assert held * 2**0.5 > 128 or plan["num_warps"] == least
            assert held < 128 * 2**0.5
            assert plan["num_warps"] in (1, 2, 4, 8, 16)
            assert N % plan["VEC"] == 0
            assert plan["VEC"] * dtype.itemsize <= 16
    expected = {4096: (4096, 0, 4), 4097: (4096, 1, 4), 5120: (4096, 1024, 4), 6144: (4096, 2048, 8)}
    expected |= {6145: (8192, 0, 8), 7168: (8192, 0, 8), 10000: (8192, 2048, 8), 12288: (8192, 4096, 16)}
    for N, blocks in (expected | {12289: (16384, 0, 16), 16384: (16384, 0, 16), 1000: (1024, 0, 4)}).items():
        plan = taken._softmax_plan(N, N, torch.bfloat16)
        assert (plan["BLOCK_N"], plan["REST"], plan["num_warps"]) == blocks
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1), (1000, 0, 8)):
        assert taken._softmax_plan(N, stride, torch.bfloat16)["VEC"] == vec
    assert taken._softmax_plan(1000, 1000, torch.float32)["VEC"] == 4


@pytest.mark.parametrize("N", [1, 5, 64, 1000])
def test_kernels_of_the_lesson(recipe: ModuleType, N: int) -> None:
    """They are right for any length, and store nothing past the end."""
    x, g = torch.randn(2, 9, N, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE)
    expected = torch.softmax(x.double(), -1)
    torch.testing.assert_close(guarded(recipe.softmax_rows, x).double(), expected, rtol=5e-6, atol=0)
    torch.testing.assert_close(recipe.softmax_rows(x.t()), torch.softmax(x.t(), -1))
    (d,) = torch.autograd.grad(recipe.Softmax.apply(x.requires_grad_()), x, g)
    torch.testing.assert_close(d.double(), expected * (g - (g * expected).sum(-1, keepdim=True)), rtol=0, atol=1e-6)


def test_zeros_are_wrong_where_lanes_are_masked(recipe: ModuleType) -> None:
    """What *Break it* breaks, at the lengths that it names."""
    for N, right in ((64, True), (50, False)):
        x = torch.randn(3, N, generator=torch.Generator().manual_seed(0)).to(recipe.DEVICE) - 5
        y = recipe.softmax_rows(x, OTHER=0)
        assert torch.allclose(y, torch.softmax(x, -1)) == right


def test_exercises(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The check accepts the answers, refuses a kernel of something else, and says that a hole is one."""
    for hole, answer, expected in (
        (recipe.log_kernel, recipe.log_answer_kernel, recipe.expected_log),
        (recipe.causal_kernel, recipe.causal_answer_kernel, recipe.expected_causal),
    ):
        for kernel in (hole, recipe.row_kernel, answer):
            recipe.check(kernel, expected)
    assert capsys.readouterr().out.splitlines() == ["not solved yet", "wrong", "right"] * 2


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


def test_traffic(recipe: ModuleType) -> None:
    """PyTorch's operators read and write as often as the page says."""
    x = torch.ones(64, 4096)
    with recipe.Traffic() as traffic:
        recipe.softmax_in_steps(x)
    assert round(traffic.moved / x.nbytes, 1) == 8
    moved = {name.split(".")[1]: [round(size / x.nbytes) for size in sizes] for name, *sizes in traffic.operators}
    assert moved == {"amax": [1, 0], "sub": [1, 1], "exp": [1, 1], "sum": [1, 0], "div": [1, 1]}


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def launches(taken: ModuleType, N: int, dtype: torch.dtype) -> list[tuple[object, dict[str, object]]]:
    """Return both kernels, each with what is known of its arguments at a launch."""
    type_name = NAMES[str(dtype).removeprefix("torch.")]
    forward, backward = (taken._softmax_plan(N, N, dtype, backward=way) for way in (False, True))
    kernels = (taken._softmax_kernel, forward), (taken._softmax_backward_kernel, backward)
    return [(kernel, {"dtype": type_name, **plan}) for kernel, plan in kernels]


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
    results = {}
    for N in (33, 197, 198, 200):
        both = launches(taken, N, torch.bfloat16)
        four = {"num_warps": 4}
        results[N] = [["bar.sync" in ptx(kernel, **known | more) for kernel, known in both] for more in ({}, four)]
    return results


def exponentials(taken: ModuleType) -> list[int]:
    """Return how many exponentials in single precision there are in float64."""
    kernels = [*launches(taken, 1000, torch.float64), *launches(taken, 5120, torch.float64)]
    return [ptx(kernel, **known).count("ex2") for kernel, known in kernels]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Where 8 divides the length a thread loads and stores 16 bytes at once; float64 stays float64."""
    widths, singles, barriers = on_h100(gallery / "fusion" / "softmax.py", codes, exponentials, waits)
    full, half, single = {"v4.b32"}, {"v2.b32"}, {"b16"}
    expected = {64: full, 1000: full, 1004: half, 1001: single, 16384: full, 16383: single}
    # Backward 256 threads share the 1024 elements of a second block.
    assert widths == {N: [access, access] for N, access in expected.items()} | {5120: [full, full | half]}
    assert singles == [0] * 4
    never, always = [False, False], [True, True]
    assert barriers == {33: [never, always], 197: [never, always], 198: [never, always], 200: [never, never]}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    return graphs(recipe.softmax, torch.randn(4, 300, requires_grad=True))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Neither input counts as written, either way."""
    (traced_graphs,) = on_h100(gallery / "fusion" / "softmax.py", traced)
    for graph in traced_graphs:
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"]
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]
        assert graph.count("<built-in function getitem>") == 1


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("softmax stored without a mask", "offs_n, e / total, mask=mask)", "offs_n, e / total)"),
    ("a second block stored without a mask", "rest, e_rest / total, mask=rest < N)", "rest, e_rest / total)"),
    (
        "rows behind the last",
        "and the same values are stored.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "and the same values are stored.\n",
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
    ("gradient without products", "total = tl.sum(g * y, axis=1", "total = tl.sum(g, axis=1"),
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
