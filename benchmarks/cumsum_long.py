"""Workloads of fusion/cumsum_long beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import COPY, Workload

WORKLOADS = [
    Workload(
        "fusion/cumsum_long",
        variant="float32",
        ours=attrgetter("cumsum_long"),
        torch=lambda torch: lambda x: torch.cumsum(x, -1),
        shapes=[(1, 128256), (4, 128256), (32, 50257), (1, 2**20), (1, 2**24), (64, 2**18), (8, 2**23)],
        inputs=lambda random, shape: (random(shape),),
        backward=COPY,
        dtype="float32",
    ),
]
