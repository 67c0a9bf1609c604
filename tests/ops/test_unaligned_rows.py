"""The op of the recipe Unaligned rows, and what the page reads in compiled code."""

# ruff: noqa: N806 - there are M rows of N elements, as in the recipe

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from case import Case, Draw, Exact, Refused
from compiled import Ask, graphs, ptx, stack
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, Layout, sizes


def exact(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> list[Exact]:
    """Return the sum, and the magnitudes of its two terms."""
    product = weight[:, None] * y
    return [Exact(x + product, x.abs() + product.abs())]


def arguments(draw: Draw, M: int, N: int, x_gap: int = 0, y_gap: int = 0) -> tuple[torch.Tensor, ...]:
    """Make two matrices whose rows lie so far apart, each beginning behind half of the gap, and weights."""
    x, y = (draw(M, N + gap)[:, gap // 2 :][:, :N] for gap in (x_gap, y_gap))
    return x, y, draw(M)


# Rows that are all edge, that begin at every distance from a multiple of 16 bytes, and that have one block or several;
# rows apart that begin alike in x and y, in one of them, and in neither.
SIZES = [(5, 1001), (3, 5), (4, 100, 8, 16), (4, 100, 8, 3), (4, 100, 3, 8), (3, 2049), (0, 7), (3, 1)]
SIZES += [(5, 0), (4, 1024), (4, 1023), (9, 33), (5, 17, 20, 7), (1, 2500), (3, 300, 16, 0), (2, 2), (9, 7), (3, 64)]
GAPS = st.sampled_from([0, 0, 0, *range(1, 21)])
# The product and the sum are rounded; a product may be too small for the accumulator.
CONTRACT = [
    Case(
        "add_rows",
        arguments,
        exact,
        sizes=SIZES,
        small=(3, 41),
        shapes=st.tuples(st.integers(0, 5), sizes(1024, 2500), GAPS, GAPS),
        roundings=2,
        floor=lambda _: torch.finfo(torch.float32).tiny,
        refused=[
            Refused(
                lambda draw: (draw(2, 3).int(), draw(2, 3).int(), draw(2).int()),
                TypeError,
                r"add_rows takes float tensors, not torch\.int32",
            ),
            *(
                Refused(make, ValueError, r"add_rows takes two matrices of one shape, .*, not \(")
                for make in (
                    lambda draw: (draw(2, 3), draw(3), draw(2)),
                    lambda draw: (draw(3), draw(3), draw(2)),
                    lambda draw: (draw(2, 3), draw(2, 2), draw(2)),
                    lambda draw: (draw(2, 3), draw(2, 3), draw(1)),
                    lambda draw: (draw(2, 3), draw(2, 3), draw(2, 3)),
                )
            ),
            *(
                Refused(make, TypeError, r"add_rows takes one dtype and device, not .*float")
                for make in (
                    lambda draw: (draw(2, 3), draw(2, 3).double(), draw(2)),
                    lambda draw: (draw(2, 3), draw(2, 3), draw(2).half()),
                )
            ),
        ],
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """In half precision, product and sum are rounded once, not each."""
    x = torch.full((2, 9), -1.0, dtype=torch.float16, device=DEVICE)
    weight = torch.full((2,), 1 + 2**-10, dtype=torch.float16, device=DEVICE)
    out = taken.add_rows(x, weight[:, None].expand(2, 9), weight)
    assert (out.to(dtype) == torch.tensor(2**-9 + 2**-20, dtype=torch.float16)).all()


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
    assert recipe.statements(recipe._add_rows_divide, recipe._add_rows_kernel) == 6 + 15


@pytest.mark.needs_gpu_memory(15)
@pytest.mark.parametrize(("M", "N"), [(2**19 + 1, 2**12 + 1), (1, 2**31 + 5)])
def test_beyond_int32(taken: ModuleType, M: int, N: int) -> None:
    """More than 2**31 elements: the last ones are right."""
    x = torch.zeros(M, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 1
    out = taken.add_rows(x, x, torch.ones(M, dtype=x.dtype, device=x.device))
    assert out[-1, -1] == 2
    assert out.sum(dtype=torch.float32) == 2


NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def widths(taken: ModuleType) -> dict[str, tuple[set[str], int]]:
    """Return, for each dtype, how wide the kernel's loads and stores are, and the bytes that threads spill."""
    results = {}
    for dtype, ACC in taken.ADD_ROWS_ACC.items():
        known = {"ACC": ACC, "VEC": 16 // dtype.itemsize, "BLOCK": 1024}
        type_name = NAMES[str(dtype).removeprefix("torch.")]
        text = ptx(taken._add_rows_kernel, type_name, **known)
        widths = set(re.findall(r"(?:ld|st)\.global\S*?\.(v\d\.b\d\d|b\d\d)\s", text))
        results[str(dtype)] = widths, stack(taken._add_rows_kernel, type_name, **known)
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Bodies are moved 16 bytes at a time, edges one element at a time, and nothing spills."""
    (results,) = on_h100(gallery / "fusion" / "unaligned_rows.py", widths)
    single = {"torch.float16": "b16", "torch.bfloat16": "b16", "torch.float32": "b32", "torch.float64": "b64"}
    vector = dict.fromkeys(single, "v4.b32") | {"torch.float64": "v2.b64"}
    assert results == {name: ({vector[name], single[name]}, 0) for name in single}


def traced(taken: ModuleType) -> list[list[str]]:
    """Return the graph."""
    return graphs(taken.add_rows, torch.randn(4, 301), torch.randn(4, 301), torch.randn(4))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written: the address of a store does not depend on them."""
    (traces,) = on_h100(gallery / "fusion" / "unaligned_rows.py", traced)
    assert traces == [["aten.empty_like.default", "triton_kernel_wrapper_functional", "<built-in function getitem>"]]


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
    (loads,) = on_h100(gallery / "fusion" / "unaligned_rows.py", branches)
    assert sorted(loads) == ["b16"] * 16 + ["v4.b32"] * 2
    assert (50257 % 4, 50257 % 8) == (1, 1)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
