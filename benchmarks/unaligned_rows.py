"""Workloads of fusion/unaligned_rows beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import ADD, Workload

WORKLOADS = [
    Workload(
        "fusion/unaligned_rows",
        ours=attrgetter("add_rows"),
        torch=lambda torch: lambda x, y, weight: torch.addcmul(x, weight[:, None], y),
        shapes=[(4096, size) for size in (1000, 2880, 4096, 4097, 7168, 50257)],
        inputs=lambda random, shape: (random(shape), random(shape), random(shape[:1])),
        forward=ADD,
        backward=None,
    ),
]
