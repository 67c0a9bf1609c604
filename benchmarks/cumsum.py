"""Workloads of fusion/cumsum beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import COPY, Workload

WORKLOADS = [
    Workload(
        "fusion/cumsum",
        variant="float32",
        ours=attrgetter("cumsum"),
        torch=lambda torch: lambda x: torch.cumsum(x, -1),
        shapes=[(2**20, 64), (4096, 4096), (4096, 32000), (2048, 50257), (1024, 128256), (40, 100277)],
        inputs=lambda random, shape: (random(shape),),
        backward=COPY,
        dtype="float32",
    ),
]
