"""Workloads of first_steps/row_sum beside other libraries."""

import math
from operator import attrgetter

from triton_gallery.libraries.workload import Bytes, Workload

WORKLOADS = [
    Workload(
        "first_steps/row_sum",
        variant="float32",
        ours=attrgetter("sum_rows"),
        torch=lambda torch: lambda x: torch.sum(x, -1),
        shapes=[(4096, 4096), (2**20, 16), (1, 2**24), (128, 131072), (65536, 1024)],
        inputs=lambda random, shape: (random(shape),),
        forward=lambda shape, itemsize: Bytes(math.prod(shape) * itemsize, shape[0] * itemsize),
        backward=None,
        dtype="float32",
    ),
]
