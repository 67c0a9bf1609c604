"""Sequences for ops that keep a state of each head: linear attention and the gated delta rule."""

from typing import Any

import torch
from hypothesis import strategies as st
from inputs import sizes

# Sequences, their tokens, heads, dimensions of keys and of values; then a number that is added to gates before the
# sigmoid, a scale of one's own, and whether there is a state at first. Several chunks and blocks of the state; states
# that last, and decays that overflow where an exponent is positive; and no tokens, sequences or heads
SIZES: list[tuple[Any, ...]] = [(1, 70, 2, 16, 32), (2, 33, 1, 20, 40, 2.0, None, False), (1, 65, 1, 100, 200)]
SIZES += [(1, 70, 1, 16, 32, 2.0, -0.3), (2, 0, 3, 16, 32), (1, 100, 1, 32, 32, -60.0), (1, 1, 1, 1, 1)]
SIZES += [(0, 5, 2, 16, 32), (2, 5, 0, 16, 32), (1, 70, 2, 16, 32, 2.0, 0.0), (1, 70, 2, 16, 32, 2.0, 1.0)]
SIZES += [(1, 100, 2, 32, 32, gate) for gate in (30.0, -10.0, -300.0)]
SIZES += [(1, T, 1, *dims) for T in (32, 64, 130) for dims in ((64, 64), (128, 128), (16, 256), (128, 32))]


def shapes(least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    """Sizes of so many tokens and more, with a state or without."""
    dimensions = st.sampled_from([1, 16, 20, 64]), st.sampled_from([1, 16, 40, 64])
    tokens, heads = sizes(64, 140).filter(lambda T: least <= T), st.integers(1, 3)
    return st.tuples(st.integers(1, 2), tokens, heads, *dimensions, st.just(2.0), st.none(), st.booleans())


OF_ALL = {
    "in_layouts": (1, 40, 2, 16, 20),
    "many": (9, 701, 9, 32, 32),
    # In float16 a weight may be too small.
    "fits": lambda size, dtype: dtype != torch.float16 or len(size) < 6 or 0 < size[5] < 10,
}
SMALL = (1, 17, 1, 2, 2)
SMALL_WITHOUT_STATE = (*SMALL, 2.0, None, False)
