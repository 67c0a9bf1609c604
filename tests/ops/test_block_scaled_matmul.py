"""The op of the recipe FP8 with 1 x 128 and 128 x 128 block scales."""

from typing import Any

import torch
from case import Case, Draw, Exact, Refused
from hypothesis import strategies as st
from inputs import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GROUP = 128


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
]
