"""Workloads of first_steps/strides beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload

WORKLOADS = [
    Workload(
        "first_steps/strides",
        variant="transpose, float32",
        ours=attrgetter("transpose"),
        torch=lambda torch: lambda x: x.t().contiguous(),
        shapes=[(4096, 4096), (12345, 6789), (16384, 8192)],
        inputs=lambda random, shape: (random(shape),),
        backward=None,
        dtype="float32",
    ),
    Workload(
        "first_steps/strides",
        variant="transpose, bfloat16",
        ours=attrgetter("transpose"),
        torch=lambda torch: lambda x: x.t().contiguous(),
        shapes=[(4096, 4096), (12345, 6789)],
        inputs=lambda random, shape: (random(shape),),
        backward=None,
    ),
]
