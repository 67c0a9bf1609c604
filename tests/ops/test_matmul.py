"""The op of the recipe Matrix multiplication and its gradient."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, compiled, graphs, ptx
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's NaN, in the interpreter

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}


def exact(a: torch.Tensor, b: torch.Tensor) -> list[Exact]:
    """Return the product of two matrices.

    A tensor core cuts off where a float32 addition rounds, so each of K products and sums counts twice; and in float64
    the reference is rounded as well.
    """
    return [Exact(a @ b, a.abs() @ b.abs(), roundings=4 * (a.shape[1] + 1))]


def matrices(draw: Draw, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two matrices that fit each other."""
    return draw(M, K), draw(K, N)


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make matrices that lie amid NaN, and one with a NaN and an infinity, which go to their columns alone."""
    around = torch.full((80, 150), torch.nan, dtype=draw.dtype, device=DEVICE)
    around[10:40, 20:90] = 1
    amid = around[10:40, 20:90]
    b = torch.ones(70, 60, dtype=draw.dtype, device=DEVICE)
    b[3, 7], b[0, 9] = torch.nan, torch.inf
    return [(amid, amid.T), (amid.T, amid), (amid, b)]


# M, N, K: one tile and several along each, in every dtype, and none
SIZES = [(130, 70, 65), (257, 300, 129), (1, 130, 70), (129, 1, 65), (16, 17, 64), (3, 5, 0), (0, 7, 5), (5, 0, 7)]
SIZES += [(130, 200, 1), (1, 1, 1), (128, 256, 128), (127, 255, 63), (64, 64, 32), (65, 64, 33), (7, 3, 1000)]
KINDS = r"matmul takes matrices of one dtype on one device, not torch\.float32 on"
SHAPES = r"matmul takes matrices of \(M, K\) and \(K, N\), not "
CONTRACT = [
    Case(
        "matmul",
        matrices,
        exact,
        autocast="asked",
        sizes=SIZES,
        small=(3, 4, 5),
        many=(4099, 4099, 65),
        shapes=st.tuples(sizes(128, 140), sizes(256, 270), sizes(64, 140)),
        reference=lambda a, b: (a.double() @ b.double()).to(a.dtype),
        special=special,
        gradients=lambda grad, a, b: exact(grad, b.T) + exact(a.T, grad),
        with_gradients=2,
        second_gradients=True,
        refused=[
            Refused(lambda draw: (draw(2, 3).int(), draw(3, 2).int()), TypeError, "matmul takes float .*int32"),
            Refused(lambda draw: (draw(2, 3), draw(3, 2).double()), TypeError, f"{KINDS} .* and torch.float64 on"),
            Refused(lambda draw: (draw(2, 3), draw(3, 2).to("meta")), TypeError, f"{KINDS} .* and .* on meta"),
            Refused(lambda draw: (draw(2, 3), draw(2, 3)), ValueError, rf"{SHAPES}\(2, 3\) and \(2, 3\)"),
            Refused(lambda draw: (draw(2, 3), draw(1, 3, 2)), ValueError, rf"{SHAPES}\(2, 3\) and \(1, 3, 2\)"),
            Refused(lambda draw: (draw(2, 3), draw(3)), ValueError, rf"{SHAPES}\(2, 3\) and \(3,\)"),
            Refused(lambda draw: (draw(3), draw(3, 2)), ValueError, rf"{SHAPES}\(3,\) and \(3, 2\)"),
            Refused(
                lambda draw: (draw(2, 3), draw(3, 2), "bf16x3"),
                ValueError,
                "matmul takes ieee, tf32 or tf32x3 as input_precision, not bf16x3",
            ),
        ],
    ),
]


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a product is as good as its accumulator and its dtype."""
    assert_close(CONTRACT[0], out.dtype, out, *exact(a.double(), b.double()))


def test_gradient_of_one_operand(taken: ModuleType) -> None:
    """Where one gradient is wanted, one is computed."""
    a, b = torch.ones(3, 4, device=DEVICE), torch.ones(4, 5, device=DEVICE)
    for operand, other in ((a, b), (b, a)):
        operand.requires_grad_()
        taken.matmul(a, b).sum().backward()
        assert operand.grad is not None
        assert other.grad is None
        operand.requires_grad_(False)
        operand.grad = None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A long sum is rounded once, not at every step."""
    K = 4099
    a, b = torch.full((3, K), 0.1, device=DEVICE).to(dtype), torch.ones(K, 5, dtype=dtype, device=DEVICE)
    expected = (a.double() @ b.double()).to(dtype)
    eps = torch.finfo(dtype).eps if dtype.itemsize == 2 else K * 2.0**-24
    torch.testing.assert_close(taken.matmul(a, b), expected, rtol=eps, atol=0)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision(taken: ModuleType, precision: str) -> None:
    """Float32 is as good as it says: on a GPU, tf32 has 11 bits, and the others have 24."""
    K = 256
    a, b = (Layout("contiguous", k).make(shape, torch.float32, DEVICE) for k, shape in enumerate([(70, K), (K, 80)]))
    inputs = a.requires_grad_(), b.requires_grad_()
    out = taken.matmul(a, b, precision)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for actual, (x, y) in zip((out, *grads), ((a, b), (out * 0 + 1, b.T), (a.T, out * 0 + 1)), strict=True):
        x, y = x.detach().double(), y.detach().double()
        error, s = (actual.double() - x @ y).abs(), x.abs() @ y.abs()
        likely = x.shape[1] ** 0.5 * 2.0**-23 * s
        if precision == "tf32":
            assert (error <= 2.0**-9 * s + x.shape[1] * 2.0**-23 * s).all()
            assert DEVICE.type == "cpu" or (error > likely).any()
        else:
            assert (error <= likely).all()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize(("how", "least"), [("nn", 0), ("nt", 1), ("tn", 0), ("tt", 1)])
def test_least(taken: ModuleType, how: str, least: int, dtype: torch.dtype) -> None:
    """The kernel learns whether b is transposed: the loop runs at least once there."""
    values = []

    class Kernel:
        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *_, **known: values.append(known["LEAST"])

    lie = (torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in ((20, 30), (30, 40)))
    a, b = (x.T.contiguous().T if t else x for x, t in zip(lie, LAYOUTS[how], strict=True))
    taken._matmul_launch(a, b, kernel=Kernel())
    assert values == [least]
    assert type(values[0]) is int  # torch.compile takes no bool from a symbolic stride


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel and its gradient are right with each tile of the page."""
    a, b = (Layout("contiguous", k).make((140, 140), torch.float16, DEVICE) for k in range(2))
    for tile in recipe.TILES:
        assert_product(recipe.tile_matmul(a, b, *tile), a, b)
    shapes = (70, 90), (90, 40), (1, 1)
    a, b, one = (Layout("contiguous", k).make(shape, torch.float16, DEVICE) for k, shape in enumerate(shapes))
    grad = one.expand(70, 40)  # the gradient of a sum is one number with strides of 0
    grad_a, grad_b = recipe.tile_matmul_backward(a, b, grad)
    for result, first, second in ((grad_a, grad, b.T), (grad_b, a.T, grad)):
        assert_product(result, first, second)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_of_the_first_kernel(recipe: ModuleType, precision: str) -> None:
    """With ieee, float32 keeps the bound of the page; with tf32, on an NVIDIA GPU, it does not."""
    a, b = (Layout("contiguous", k).make(shape, torch.float32, DEVICE) for k, shape in enumerate([(64, 70), (70, 80)]))
    expected, bound = recipe.error_bound(a, b)
    is_within = ((recipe.tile_matmul(a, b, PRECISION=precision) - expected).abs() <= bound).all()
    assert is_within == (precision == "ieee" or DEVICE.type == "cpu" or torch.version.hip is not None)


def test_launcher_refuses(recipe: ModuleType) -> None:
    """What the first kernel cannot multiply is refused, not read past its end."""
    a = torch.ones(20, 30, dtype=torch.float16, device=DEVICE)
    for b in (a, a.T, a.T.contiguous().float()):
        with pytest.raises(AssertionError):
            recipe.tile_matmul(a, b)
    with pytest.raises(AssertionError):
        recipe.tile_matmul(a.double(), a.T.contiguous().double())


def test_exercises(recipe: ModuleType) -> None:
    """Their checks tell a hole, a mistake and the answer apart."""
    assert recipe.check_fused(recipe.fused_matmul) == "not solved yet"
    assert recipe.check_fused(recipe.fused_answer) == "right"
    assert recipe.check_fused(lambda a, b, bias, x: torch.relu(a @ b + bias + x)) == "wrong"
    assert recipe.check_registers(recipe.accumulator_registers) == "not solved yet"
    assert recipe.check_registers(lambda M, N, warps: M * N // (32 * warps)) == "right"
    assert recipe.check_registers(lambda M, N, warps: M * N // warps) == "wrong"


def at_launch(taken: ModuleType, dtype: str, M: int, N: int, how: str, precision: str = "ieee") -> dict[str, object]:
    """Return what the launcher passes on for matrices of which 16 divides all sizes."""
    import triton.language as tl

    most_m, most_n, block_k, num_warps = taken.MATMUL_TILES[getattr(torch, dtype)]
    block_m, block_n = taken._matmul_block(M, most_m), taken._matmul_block(N, most_n)
    ones = {"n": "stride_ak", "t": "stride_am"}[how[0]], {"n": "stride_bn", "t": "stride_bk"}[how[1]]
    sizes = {"M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"}
    return {
        "dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[dtype],
        "num_warps": num_warps if block_m * block_n > 64 * 128 else 4,
        "multiples": sizes - set(ones),
        **dict.fromkeys(ones, 1),
        "LEAST": int(how[1] == "t"),
        "ACC": tl.float64 if dtype == "float64" else tl.float32,
        "PRECISION": precision,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }


def copies(taken: ModuleType) -> dict[str, tuple[set[str], bool]]:
    """Return, for each layout, how many bytes an asynchronous copy takes, and whether Hopper's instruction is there."""
    results = {}
    for how in LAYOUTS:
        text = compiled(taken._matmul_kernel, **at_launch(taken, "float16", 4096, 4096, how)).asm["ptx"]
        results[how] = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text)), "wgmma" in text
    return results


def notes(taken: ModuleType) -> list[str]:
    """Return what the assembler says of products that wait for each other."""
    from triton.backends.nvidia.compiler import get_ptxas

    lines = []
    for how, dtype, M in product(LAYOUTS, ("float16", "bfloat16"), (64, 128)):
        code = ptx(taken._matmul_kernel, **at_launch(taken, dtype, M, 4096, how))
        with NamedTemporaryFile(suffix=".ptx", mode="w") as file:
            file.write(code)
            file.flush()
            command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "Used" in log
        lines += [f"{how} {dtype} {M} {line}" for line in log.splitlines() if "Potential Performance" in line]
    return lines


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """However operands lie, a thread copies 16 bytes at once, and tensor cores of Hopper multiply."""
    (results,) = on_h100(gallery / "matmul" / "matmul.py", copies)
    assert results == dict.fromkeys(LAYOUTS, ({"0x10"}, True))


@pytest.mark.thorough
def test_products_do_not_wait_for_each_other(gallery: Path, on_h100: Ask) -> None:
    """In no layout has the assembler to put products one after the other."""
    (lines,) = on_h100(gallery / "matmul" / "matmul.py", notes)
    assert lines == []


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    return graphs(recipe.matmul, *(torch.randn(40, 40, requires_grad=True) for _ in range(2)))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """A product is one kernel forward and two backward, and no operand is copied."""
    (traced_graphs,) = on_h100(gallery / "matmul" / "matmul.py", traced)
    for graph, products in zip(traced_graphs, (1, 2), strict=True):
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"] * products
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


@pytest.mark.needs_gpu_memory(7)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last row of an operand is right, and of its transpose."""
    M, K = 2**15 + 8, 2**16 + 8
    a = torch.zeros(M, K, dtype=torch.bfloat16, device=DEVICE)
    a[-1], a[:, -1] = 1, 1
    for first, expected in ((a, K), (a.T, M)):
        b = torch.ones(first.shape[1], 16, dtype=torch.bfloat16, device=DEVICE)
        out = taken.matmul(first, b)
        torch.testing.assert_close(out[-1], torch.full_like(out[-1], expected))
        assert (out[:-1] == 1).all()
        torch.testing.assert_close(taken.matmul(b.T, first.T)[:, -1], out[-1])


@pytest.mark.needs_gpu_memory(12)
def test_step_beyond_int32(taken: ModuleType) -> None:
    """A step along K is more than 2**31 elements."""
    a = torch.zeros(80, 2**26, dtype=torch.bfloat16, device=DEVICE)
    a[:, -1] = 1
    out = taken.matmul(a[:, -32:].T, torch.ones(80, 16, dtype=torch.bfloat16, device=DEVICE))
    assert (out[-1] == 80).all()
    assert not out[:-1].any()


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("rows without a mask", "a_mask = (offs_m < M) & (offs_k[None, :] < K - start)", "a_mask = offs_m < M"),
    ("columns without a mask", "b_mask = (offs_k[:, None] < K - start) & (offs_n < N)", "b_mask = offs_n < N"),
    (
        "stored past the end",
        "    c_mask = (offs_m < M) & (offs_n < N)\n    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)\n\n\n"
        "def _matmul_block",
        "    c_mask = offs_n < N\n    tl.store(c_ptr + offs_m * N + offs_n, acc, mask=c_mask)\n\n\ndef _matmul_block",
    ),
    (
        "half an accumulator",
        "acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)",
        "acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC).to(tl.float16).to(ACC)",
    ),
    ("rows taken for contiguous", "offs_m * stride_am + offs_k[None, :] * stride_ak", "offs_m * K + offs_k[None, :]"),
    ("a loop that always runs", "LEAST=int(b.stride(0) == 1)", "LEAST=1"),
    ("b's step along K is a's", "b_ptrs += step * stride_bk", "b_ptrs += step * stride_ak"),
]
