"""Workloads of fusion/few_long_rows beside PyTorch."""

import math
from operator import attrgetter

from triton_gallery.libraries.workload import COPY, Bytes, Workload


def read(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return the work of reading a matrix, and writing a number for each row."""
    return Bytes(math.prod(shape) * itemsize, shape[0] * 4)


SHAPES = [
    *((1, size) for size in (4096, 16384, 50257, 128256, 2**20, 2**24)),
    *((8, size) for size in (32000, 128256)),
    *((64, size) for size in (4096, 32000, 128256, 201088)),
]
WORKLOADS = [
    Workload(
        "fusion/few_long_rows",
        variant="sum",
        ours=attrgetter("few_long_rows_sum"),
        torch=lambda torch: lambda x: torch.sum(x, -1, dtype=torch.float32),
        shapes=SHAPES,
        inputs=lambda random, shape: (random(shape),),
        forward=read,
        backward=None,
    ),
    Workload(
        "fusion/few_long_rows",
        variant="log-sum-exp",
        ours=attrgetter("few_long_rows_logsumexp"),
        # In bfloat16, its rounded result would make the gradient wrong by up to 4 %.
        torch=lambda torch: lambda x: torch.logsumexp(x.float(), -1),
        shapes=SHAPES,
        inputs=lambda random, shape: (random(shape),),
        forward=read,
        backward=COPY,
    ),
]
