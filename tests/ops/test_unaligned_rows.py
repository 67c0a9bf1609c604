"""The op of the recipe Unaligned rows, and what the page reads in compiled code."""

# ruff: noqa: N806 - there are M rows of N elements, as in the recipe

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/unaligned_rows.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/unaligned_rows.py")


def assert_right(taken: ModuleType, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
    """Assert that the op gives what float64 gives, but for roundings, and the same each time."""
    out = guarded(taken.add_rows, x, y, weight)
    assert torch.equal(taken.add_rows(x, y, weight), out)
    assert out.dtype == x.dtype
    assert out.device.type == DEVICE.type
    assert out.is_contiguous()
    product = weight.double()[:, None] * y.double()
    magnitude = x.double().abs() + product.abs()
    assert_within(out, x.double() + product, magnitude, roundings=2, floor=torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=25)
@given(M=st.integers(0, 5), N=sizes(1024, 2500), of_x=layouts(), of_y=layouts(), of_weight=layouts())
@example(M=5, N=1001, of_x=Layout("contiguous", 0), of_y=Layout("contiguous", 1), of_weight=Layout("contiguous", 2))
@example(M=3, N=5, of_x=Layout("contiguous", 0), of_y=Layout("contiguous", 1), of_weight=Layout("contiguous", 2))
def test_value(
    taken: ModuleType, dtype: torch.dtype, M: int, N: int, of_x: Layout, of_y: Layout, of_weight: Layout
) -> None:
    """The value is right for rows of any length, in any layout, and its dtype is that of the arguments."""
    x, y = of_x.make((M, N), dtype, DEVICE), of_y.make((M, N), dtype, DEVICE)
    assert_right(taken, x, y, of_weight.make((M,), dtype, DEVICE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=25)
@given(
    M=st.integers(1, 5),
    N=sizes(64, 300),
    gaps=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    starts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    seed=st.integers(0, 2**31),
)
@example(M=4, N=100, gaps=(8, 16), starts=(0, 0), seed=0)
@example(M=4, N=100, gaps=(8, 3), starts=(0, 0), seed=0)
@example(M=4, N=100, gaps=(3, 8), starts=(0, 0), seed=0)
def test_rows_apart(
    taken: ModuleType,
    dtype: torch.dtype,
    M: int,
    N: int,
    gaps: tuple[int, int],
    starts: tuple[int, int],
    seed: int,
) -> None:
    """Rows lie apart, begin anywhere, and x's begin alike with y's or not."""
    x, y = (
        Layout("contiguous", seed + k).make((M, N + gap), dtype, DEVICE)[:, start:][:, :N]
        for k, (gap, start) in enumerate(zip(gaps, (min(pair) for pair in zip(gaps, starts, strict=True)), strict=True))
    )
    assert_right(taken, x, y, Layout("contiguous", seed + 2).make((M,), dtype, DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """In half precision, product and sum are rounded once, not each."""
    x = torch.full((2, 9), -1.0, dtype=torch.float16, device=DEVICE)
    weight = torch.full((2,), 1 + 2**-10, dtype=torch.float16, device=DEVICE)
    out = taken.add_rows(x, weight[:, None].expand(2, 9), weight)
    assert (out.to(dtype) == torch.tensor(2**-9 + 2**-20, dtype=torch.float16)).all()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launcher_serves_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x, y = (Layout("contiguous", k).make((3, 41), dtype, DEVICE) for k in range(2))
    weight = Layout("contiguous", 2).make((3,), dtype, DEVICE)
    assert torch.equal(at_cuda(taken.add_rows, x, y, weight), taken.add_rows(x, y, weight))


def test_flat_kernels(recipe: ModuleType) -> None:
    """The additions of the page agree with PyTorch at lengths around a block and a vector."""
    for N in (1, 7, 8, 9, 1023, 1024, 1025, 4096 + 5):
        x, y = (Layout("contiguous", k).make((N,), torch.float16, recipe.DEVICE) for k in range(2))
        for function in (recipe.add, recipe.add_body):
            assert torch.equal(guarded(function, x, y), x + y)


def test_rows_of_the_ladder(recipe: ModuleType) -> None:
    """The kernel runs with and without edges, and the statements are those of the page."""
    for VEC in (1, 8):
        recipe.rows(recipe.random(3, 41), recipe.random(3, 41), recipe.random(3), VEC)
    assert recipe.statements(recipe.add_kernel) == 6
    assert recipe.statements(recipe.body_kernel) == 12
    # Its helper has a docstring, which counts here.
    assert recipe.statements(recipe._add_rows_divide, recipe._add_rows_kernel) == 6 + 15 + 1


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, weight = torch.ones(2, 3, device=DEVICE), torch.ones(2, device=DEVICE)
    with pytest.raises(TypeError, match=r"^add_rows takes float tensors, not torch\.int32"):
        taken.add_rows(x.int(), x.int(), weight.int())
    for inputs in ((x, x[0], weight), (x[0], x[0], weight), (x, x[:, :2], weight), (x, x, weight[:1]), (x, x, x)):
        with pytest.raises(ValueError, match=r"^add_rows takes two matrices of one shape, .*, not \("):
            taken.add_rows(*inputs)
    for inputs in ((x, x.double(), weight), (x, x, weight.half())):
        with pytest.raises(TypeError, match=r"^add_rows takes one dtype and device, not .*float"):
            taken.add_rows(*inputs)


def test_has_no_gradient(taken: ModuleType) -> None:
    """A gradient is refused, not zero."""
    x, weight = torch.ones(2, 3, device=DEVICE), torch.ones(2, device=DEVICE)
    out = taken.add_rows(x.requires_grad_(), x, weight)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


@pytest.mark.needs_gpu_memory(15)
@pytest.mark.parametrize(("M", "N"), [(2**19 + 1, 2**12 + 1), (1, 2**31 + 5)])
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last ones are right."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 1
    out = taken.add_rows(x, x, torch.ones(M, dtype=x.dtype, device=x.device))
    assert out[-1, -1] == 2
    assert out.sum(dtype=torch.float32) == 2


@needs_a_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """The op passes the whole of opcheck."""
    x, y = (torch.randn(7, 1001, device=DEVICE).to(dtype) for _ in range(2))
    inputs = x, y, torch.randn(7, device=DEVICE).to(dtype)
    assert set(torch.library.opcheck(taken.add_rows, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: taken.add_rows(x * 2, x, w), fullgraph=True, dynamic=dynamic)
    for M, N in ((4, 100), (6, 100), (2, 5001)):
        x, weight = torch.randn(M, N, device=DEVICE), torch.randn(M, device=DEVICE)
        torch.testing.assert_close(compiled(x, weight), torch.addcmul(x * 2, weight[:, None], x))


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def widths(taken: ModuleType) -> dict[str, tuple[set[str], int]]:
    """Return, for each dtype, how wide the kernel's loads and stores are, and the bytes that threads spill."""
    found = {}
    for dtype, ACC in taken.ADD_ROWS_ACC.items():
        known = {"ACC": ACC, "VEC": 16 // dtype.itemsize, "BLOCK": 1024}
        of = NAMES[str(dtype).removeprefix("torch.")]
        text = ptx(taken._add_rows_kernel, of, **known)
        widths = set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b\d\d|b\d\d)\s", text))
        found[str(dtype)] = widths, stack(taken._add_rows_kernel, of, **known)
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Bodies are moved 16 bytes at a time, edges one element at a time, and nothing spills."""
    (found,) = on_h100(gallery / "fusion" / "unaligned_rows.py", widths)
    single = {"torch.float16": "b16", "torch.bfloat16": "b16", "torch.float32": "b32", "torch.float64": "b64"}
    wide = dict.fromkeys(single, "v4.b32") | {"torch.float64": "v2.b64"}
    assert found == {name: ({wide[name], single[name]}, 0) for name in single}


def traced(taken: ModuleType) -> list[list[str]]:
    """Return the graph."""
    return graphs(taken.add_rows, torch.randn(4, 301), torch.randn(4, 301), torch.randn(4))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written: the address of a store does not depend on them."""
    (found,) = on_h100(gallery / "fusion" / "unaligned_rows.py", traced)
    assert found == [["aten.empty_like.default", "triton_kernel_wrapper_functional", "<built-in function getitem>"]]


def branches(recipe: ModuleType) -> list[str]:
    """Return the loads of the third answer: whole blocks without a mask."""
    tl = recipe.tl

    @recipe.triton.jit
    def branches_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
        pid = tl.program_id(axis=0).to(tl.int64)
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        if (pid + 1) * BLOCK <= N:
            tl.store(out_ptr + offs, tl.load(x_ptr + offs) + tl.load(y_ptr + offs))
        else:
            mask = offs < N
            x, y = tl.load(x_ptr + offs, mask=mask), tl.load(y_ptr + offs, mask=mask)
            tl.store(out_ptr + offs, x + y, mask=mask)

    return re.findall(r"ld\.global\S*?\.(v\d\.b32|b16)\s", ptx(branches_kernel, "bf16", BLOCK=1024))


def test_answer(gallery: Path, on_h100: Ask) -> None:
    """With two branches the compiler writes both kinds of loads; and rows of 50257 take turns."""
    (found,) = on_h100(gallery / "fusion" / "unaligned_rows.py", branches)
    assert sorted(found) == ["b16"] * 16 + ["v4.b32"] * 2
    assert (50257 % 4, 50257 % 8) == (1, 1)


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/unaligned_rows")
    wide = "2 x ld.global.v4.b32, 1 x st.global.v4.b32"
    single = "16 x ld.global.b16, 8 x st.global.b16"
    lines = out.splitlines()
    assert [line.partition(" additions")[0] for line in lines[:2]] == ["65,536", "65,537"]
    assert re.fullmatch(r"largest relative error \d\.\de-03, allowed 7\.8e-03", lines[2])
    assert lines[3:5] == [f"16 divides N  {wide}", f"any other N   {single}"]
    assert [line.split("  ")[-1].strip() for line in lines[5:8]] == [single, wide, wide]
    assert lines[8] == f"{wide}, 2 x ld.global.b16, 1 x st.global.b16"
    assert [line[17:].strip() for line in lines[9:11]] == [single, wide]
    assert "v4" not in lines[11]
    assert "2 x ld.global.v4.b32, 1 x st.global.v4.b32" in lines[12]
    assert lines[-1] == wide


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    (
        "add_rows",
        lambda normal, M, N: (normal(M, N), normal(M, N), normal(M)),
        lambda x, y, weight: torch.addcmul(x, weight[:, None], y),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("stored without a mask", "out_body + offs, x + weight * y, mask=mask)", "out_body + offs, x + weight * y)"),
    ("edges stored without a mask", "x_e + weight * y_e, mask=mask_e)", "x_e + weight * y_e)"),
    ("no edges", "    if block == 0:\n", "    if block < 0:\n"),
    ("edges before the body alone", "tl.where(edge < head, edge, edge + length)", "edge"),
    ("a body that begins too late", "(start + head) // VEC * VEC", "(start + head) // VEC * VEC + VEC"),
    ("rows of x taken for adjacent", "x_ptr, row * stride_xm, N, VEC", "x_ptr, row * N, N, VEC"),
    ("rows of y taken for adjacent", "y_ptr, row * stride_ym, N, VEC", "y_ptr, row * N, N, VEC"),
    (
        "a body where rows do not begin alike",
        "if (stride_xm - N) % VEC or (stride_ym - N) % VEC:",
        "if (stride_xm - N) % VEC:",
    ),
    ("one weight for all rows", "tl.load(weight_ptr + row)", "tl.load(weight_ptr)"),
    ("weights taken for neighbours", "weight.contiguous(),", "weight,"),
    ("columns taken for neighbours", "x if x.stride(1) == 1 else x.contiguous()", "x"),
    ("no launcher for GPUs", 'ADD_ROWS_LIBRARY.impl("add_rows", _add_rows_launch, "CUDA")\n', ""),
]
