"""The op of the recipe Strides and tiles."""

# ruff: noqa: N806 - the extents of a matrix are called M and N, as in the recipe

from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import FLOATS, INTEGERS, Layout, layouts, sizes

BLOCK = 64  # a side of the recipe's float32 tile; other blocks would only make these sizes less interesting
SIZES = sizes(BLOCK, 3 * BLOCK + 1)


def assert_transposed(recipe: ModuleType, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that every bit is where it belongs."""
    assert out.dtype == x.dtype
    assert out.shape == x.shape[::-1]
    assert out.device.type == recipe.DEVICE.type
    assert out.is_contiguous()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(out.view(bits), x.view(bits).t().contiguous())


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@given(M=SIZES, N=SIZES, of_x=layouts())
def test_all_dtypes(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, of_x: Layout) -> None:
    """A transpose moves bits, so all of them are equal."""
    x = of_x.make((M, N), dtype, recipe.DEVICE)
    assert_transposed(recipe, x, guarded(recipe.transpose, x))


@given(short=st.integers(0, 5), long=sizes(4096, 3 * 4096), turned=st.booleans(), of_x=layouts())
def test_thin(recipe: ModuleType, short: int, long: int, turned: bool, of_x: Layout) -> None:
    """In a thin matrix, tiles have another shape."""
    x = of_x.make((long, short) if turned else (short, long), torch.float32, recipe.DEVICE)
    assert_transposed(recipe, x, guarded(recipe.transpose, x))


@given(M=sizes(8, 40), N=sizes(8, 40), group=st.integers(1, 9), tile=st.tuples(*2 * [st.sampled_from([1, 2, 8, 32])]))
def test_tiles_and_orders(recipe: ModuleType, M: int, N: int, group: int, tile: tuple[int, int]) -> None:
    """Every tile in every order gives the same, also where the last group of rows is not full."""
    block_m, block_n = (max(block, -(-size // 7)) for block, size in zip(tile, (M, N), strict=True))
    block_m, block_n = 1 << (block_m - 1).bit_length(), 1 << (block_n - 1).bit_length()  # at most 49 programs
    x = Layout("contiguous", 0).make((M, N), torch.float32, recipe.DEVICE)
    out = torch.full((N, M), torch.nan, device=recipe.DEVICE)
    if x.numel():
        recipe.launch(x, out, block_m, block_n, 4, group)
    assert_transposed(recipe, x, out)


def test_every_variant(recipe: ModuleType) -> None:
    """All tiles that the recipe measures, and those of its op, for each size of an element."""
    for dtype in (torch.int8, torch.int16, torch.float32, torch.float64):
        x = Layout("strided", 0).make((150, 131), dtype, recipe.DEVICE)
        for tile in {*recipe.VARIANTS, *recipe.TILES.values()}:
            out = torch.zeros(131, 150, dtype=dtype, device=recipe.DEVICE)
            recipe.launch(x, out, *tile)
            assert_transposed(recipe, x, out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: ModuleType, dtype: torch.dtype) -> None:
    """NaN with its payload, infinities, signed zeros and subnormal numbers stay as they are."""
    finfo = torch.finfo(dtype)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, finfo.tiny, finfo.tiny / 2, finfo.max]
    x = torch.tensor(special, dtype=dtype, device=recipe.DEVICE).repeat(9, 1)
    assert_transposed(recipe, x, recipe.transpose(x))


def test_rare_dtypes(recipe: ModuleType) -> None:
    """Whatever has elements of 1, 2, 4 or 8 bytes; a conjugate or negated view is carried out."""
    x = torch.randn(33, 70, device=recipe.DEVICE)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64):
        rare = x.abs().to(dtype)
        assert_transposed(recipe, rare, recipe.transpose(rare))
    z = torch.complex(x, x.square())
    for view in (z, z[:, ::2], z.conj(), z.conj().imag):
        assert torch.equal(recipe.transpose(view), view.t().resolve_conj().resolve_neg())


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_several_tiles(recipe: ModuleType, dtype: torch.dtype) -> None:
    """A matrix of several tiles on both axes, ragged on both, under guards."""
    M, N = (2 * side + 3 for side in recipe.TILES[dtype.itemsize][:2])
    x = Layout("contiguous", 1).make((M, N), dtype, recipe.DEVICE)
    assert_transposed(recipe, x, guarded(recipe.transpose, x))


def test_steps(recipe: ModuleType) -> None:
    """The kernel of the first step, which takes contiguous and other strides too."""
    for layout in ("contiguous", "transposed", "strided", "expanded"):
        for N in (1, 1000, 1024, 2050):
            x = Layout(layout, N).make((3, N), torch.float32, recipe.DEVICE)
            assert_transposed(recipe, x, guarded(recipe.transpose_rows, x))


def test_sectors(recipe: ModuleType) -> None:
    """The arithmetic of the first table."""
    counts = [recipe.sectors(*access) for access in recipe.ACCESSES.values()]
    assert counts == [4, 8, 32, 16]
    assert recipe.sectors(1, 1, 1) == 1
    assert recipe.sectors(8, 0, 1) == 1


@pytest.mark.needs_gpu_memory(5)
@pytest.mark.parametrize("shape", [(2**31 + 5, 1), (3, 2**30), (2**15 + 3, 2**16 + 1)], ids=str)
def test_beyond_int32(recipe: ModuleType, shape: tuple[int, int]) -> None:
    """A matrix may have more than 2**31 elements, read across all of them and written across all of them."""
    x = torch.randint(-128, 128, shape, dtype=torch.int8, device=recipe.DEVICE)
    out = recipe.transpose(x)
    for rows in x.split(max(1, 2**28 // shape[1])):  # in parts, so that the reference stays small
        assert torch.equal(out[:, : rows.shape[0]], rows.t())
        out = out[:, rows.shape[0] :]


@pytest.mark.needs_gpu_memory(5)
def test_beyond_int32_in_a_view(recipe: ModuleType) -> None:
    """A small view whose strides span more than 2**31 elements, each stride alone fitting into 32 bits."""
    memory = torch.randint(-128, 128, (2**32 + 2**20,), dtype=torch.int8, device=recipe.DEVICE)
    x = memory.as_strided((65, 130), (2**26 - 1, 3))
    assert_transposed(recipe, x, recipe.transpose(x))
    assert_transposed(recipe, x.t(), recipe.transpose(x.t()))


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    with pytest.raises(ValueError, match="matrix, not 1 dim"):
        recipe.transpose(x[0])
    with pytest.raises(ValueError, match="matrix, not 3 dim"):
        recipe.transpose(x[None])
    with pytest.raises(TypeError, match=r"not torch\.complex128"):
        recipe.transpose(x.to(torch.complex128))
    with pytest.raises(ValueError, match=r"device, not meta"):
        recipe.transpose(x.to("meta"))
    with pytest.raises(ValueError, match="no backward"):
        recipe.transpose(x.clone().requires_grad_())
    with torch.no_grad():
        recipe.transpose(x.clone().requires_grad_())


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("transpose", lambda normal, M, N: (normal(M, N),)),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("transpose stored without a mask", "tl.store(out_ptrs, x, mask=mask)", "tl.store(out_ptrs, x)"),
    ("transpose with half a mask", "mask = (offs_m < M) & (offs_n < N)", "mask = offs_m < M"),
    ("transpose of adjacent columns", "offs_m * stride_xm + offs_n * stride_xn", "offs_m * stride_xm + offs_n"),
    ("tiles counted by rows", "pid // tiles_n, pid % tiles_n, tiles_m", "pid // tiles_m, pid % tiles_n, tiles_m"),
]
