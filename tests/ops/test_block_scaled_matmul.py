"""The op of the recipe FP8 with 1 x 128 and 128 x 128 block scales."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import gluon_model
import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE
from op_fixtures import end_ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUP = 128
RECIPE = "low_precision/block_scaled_matmul.py"


def arguments(
    draw: Draw,
    M: tuple[int, ...],
    N: int,
    K: int,
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    by_columns: bool = False,
) -> tuple[Any, ...]:
    """Make matrices, and scales that differ from block to block; the result has the dtype of the case."""

    def positive(x: torch.Tensor) -> torch.Tensor:
        return x.abs() + 0.5

    groups = -(-K // GROUP)
    x, weight = draw(*M, K, dtype=torch.float32).to(dtypes[0]), draw(N, K, dtype=torch.float32).to(dtypes[1])
    scale_x = draw(*M, groups, dtype=torch.float32, of=positive)
    scale_weight = draw(-(-N // GROUP), groups, dtype=torch.float32, of=positive)
    if by_columns:  # as PyTorch's scaled_mm wants them
        scale_x, scale_weight = (t.mT.contiguous().mT for t in (scale_x, scale_weight))
    return x, weight, scale_x, scale_weight, draw.dtype


def exact(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor, out_dtype: torch.dtype
) -> list[Exact]:
    """Return the product; a term of float8 sums in tensor cores loses more than float32 does."""
    x = x * scale_x.repeat_interleave(GROUP, -1)
    scales = scale_weight.repeat_interleave(GROUP, 0)[: weight.shape[0]]
    weight = weight * scales.repeat_interleave(GROUP, 1)
    value, terms = x @ weight.T, x.abs() @ weight.abs().T
    # Hopper's tensor cores keep 13 bits of what they add; a sum of 128 is then added in float32.
    return [Exact(value, terms * (2**11 if DEVICE.type == "cuda" else 1))]


SIZES = [((5,), 40, 128), ((130,), 300, 384), ((2, 3), 7, 1792, (E5M2, E4M3)), ((1,), 1, 128), ((0,), 5, 128)]
SIZES += [((3,), 7, 0), ((129,), 257, 256, (E4M3, E5M2), True), ((64,), 128, 256), ((2, 3), 129, 256, (E5M2, E5M2))]
DTYPES = st.sampled_from([E4M3, E5M2])
SHAPES = st.tuples(
    st.tuples(st.integers(1, 140)),
    st.integers(1, 300),
    st.integers(1, 4).map(lambda n: GROUP * n),
    st.tuples(DTYPES, DTYPES),
    st.booleans(),
)


def refused(error: type[Exception], match: str, place: int, change: Any) -> Refused:
    """Return a call that raises, with one argument changed."""

    def make(draw: Draw) -> tuple[Any, ...]:
        given = list(arguments(draw, (4,), 130, 256))
        given[place] = change(given[place])
        return tuple(given)

    return Refused(make, error, match)


X, WEIGHT, SCALE_X, SCALE_WEIGHT, OUT_DTYPE = range(5)
REFUSED = [
    refused(TypeError, "block_scaled_matmul takes float8_e4m3fn and float8_e5m2, not", X, lambda x: x.float()),
    refused(TypeError, "block_scaled_matmul takes float8_e4m3fn and float8_e5m2, not", WEIGHT, lambda w: w.half()),
    refused(TypeError, "block_scaled_matmul takes scales of float32, not", SCALE_X, lambda s: s.half()),
    refused(
        TypeError, "block_scaled_matmul returns bfloat16, float16 or float32, not", OUT_DTYPE, lambda _: torch.float64
    ),
    refused(ValueError, r"block_scaled_matmul takes x \(\.\.\., K\) and weight \(N, K\), not", X, lambda x: x[:, :128]),
    refused(ValueError, r"block_scaled_matmul takes scales of shapes \(4, 2\) and \(2, 2\)", SCALE_X, lambda s: s[:1]),
    refused(
        ValueError, r"block_scaled_matmul takes scales of shapes \(4, 2\) and \(2, 2\)", SCALE_WEIGHT, lambda s: s[:1]
    ),
    Refused(
        lambda draw: arguments(draw, (4,), 8, 192),
        ValueError,
        "block_scaled_matmul takes K that is a multiple of 128, not 192",
    ),
]

# What tests/contract asks for.
CONTRACT = [
    Case(
        "block_scaled_matmul",
        arguments,
        exact,
        sizes=SIZES,
        small=((3,), 8, 128),
        many=((1031,), 2053, 128),
        shapes=SHAPES,
        dtypes=[torch.bfloat16, torch.float16, torch.float32],
        layouts=["contiguous"],
        roundings=lambda _: 2048,
        contiguous=False,
        refused=REFUSED,
    ),
]


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon, on a Hopper GPU of two multiprocessors."""
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_block_scaled_matmul.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_fp8_matmul_gpu", lambda _: (2, gluon_model.ROOM))
        patch.setattr(recipe, "_block_scaled_matmul_is_hopper", lambda _: True)
        yield recipe
    end_ops(recipe)  # PyTorch 2.11 refuses a second one


@settings(max_examples=20)
@given(size=SHAPES, dtype=st.sampled_from(CONTRACT[0].dtypes), seed=st.integers(0, 2**31))
def test_accumulator_by_a_model(modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> None:
    """Whatever happens first, the kernel for Hopper is right: no wait is for ever, and no buffer changes too soon."""
    assert_modelled(modelled, size, dtype, seed)


@pytest.mark.parametrize("size", [((300,), 400, 1024), ((700,), 130, 256, (E5M2, E4M3), True), ((4, 100), 300, 1920)])
@pytest.mark.parametrize("seed", range(4))
def test_accumulator_of_many_tiles_by_a_model(modelled: ModuleType, size: tuple[Any, ...], seed: int) -> None:
    """Two programs have several tiles each, of more and of fewer steps than buffers."""
    assert_modelled(modelled, size, torch.bfloat16, seed)


def assert_modelled(modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> None:
    """Assert that the kernel for Hopper gives the product."""
    gluon_model.SEEDS[0] = seed
    *tensors, _ = arguments(Draw(dtype, device=torch.device("cpu"), seed=seed), *size)
    out = guarded(lambda *inputs: modelled._block_scaled_matmul_launch(*inputs, dtype), *tensors)
    (right,) = exact(*(tensor.double() for tensor in tensors), dtype)
    assert (out.shape, out.dtype) == (right.value.shape, dtype)
    assert_close(CONTRACT[0], dtype, out, right)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_which_kernel_takes_a_product(load_op: Callable[[str], ModuleType], itemsize: int) -> None:
    """On Hopper all go to the kernel in Gluon, few rows with small tiles; what is chosen fits into shared memory."""
    plan = load_op(RECIPE)._block_scaled_matmul_plan
    for rows_of_x in (1, 16, 64, 1024, 4096, 16384):
        for is_hopper in (False, True):
            _, tile, stages = plan(rows_of_x, 7168, itemsize, 132, gluon_model.ROOM, is_hopper)
            rows, columns, count, _ = tile
            assert not is_hopper or rows == 64 * count
            assert rows_of_x > 64 or rows == 64
            assert stages >= 3
            assert rows * columns * itemsize + stages * (rows + columns) * GROUP < gluon_model.ROOM


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("scales of x of the first group alone", "rows + k // GROUP * stride_xk", "rows"),
    ("scales of the weight of the first group alone", "block + k // GROUP * stride_wk", "block"),
    (
        "scales of the weight of another block",
        "scale_weight_ptr + (off_n // GROUP).to(tl.int64)",
        "scale_weight_ptr + pid_n.to(tl.int64)",
    ),
    ("scales of other rows", "scale_x_ptr + offs_m * stride_xm", "scale_x_ptr + tl.arange(0, BLOCK_M) * stride_xm"),
    (
        "the accumulator is scaled again",
        "acc += tl.dot(x, weight) * scale[:, None]",
        "acc = tl.dot(x, weight, acc) * scale[:, None]",
    ),
    ("without the last block of K", "for k in range(0, K, GROUP):", "for k in range(0, K - GROUP, GROUP):"),
    ("on Hopper, scales of steps are those of the first two", "            x0, w0, x1, w1 = x2, w2, x3, w3\n", ""),
    ("on Hopper, scales of rows of the first group", "off_m += NUMBER * ROWS\n", "off_m += 0\n"),
    (
        "on Hopper, the accumulator is scaled again",
        "return acc + part * scale[:, None], part",
        "return (acc + part) * scale[:, None], part",
    ),
    (
        "on Hopper, the accumulator reads a buffer that is given back",
        "    part = warpgroup_mma_wait(0, deps=(part,))\n    mbarrier.arrive(empty.index(stage))\n",
        "    mbarrier.arrive(empty.index(stage))\n    part = warpgroup_mma_wait(0, deps=(part,))\n",
    ),
    (
        "on Hopper, the accumulator is stored over a store",
        "        tma.store_wait(0)  # the store of the last tile has read the buffer\n",
        "",
    ),
]
