"""Workloads of fusion/softmax_long beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload

WORKLOADS = [
    Workload(
        "fusion/softmax_long",
        ours=attrgetter("softmax_long"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=[
            *((4096, size) for size in (10000, 16384, 32000, 50257, 65536, 128256)),
            *((1, 128256), (64, 151936)),
        ],
        inputs=lambda random, shape: (random(shape),),
        libraries={"Liger": attrgetter("liger_softmax")},
    ),
]
