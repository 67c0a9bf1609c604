"""Workloads of fusion/softmax_long beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, drawn_rows

WORKLOADS = [
    Workload(
        "fusion/softmax_long",
        ours=attrgetter("softmax_long"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=[
            *((4096, size) for size in (10000, 16384, 50257, 128256)),
            *((1, 128256), (3, 128256), (64, 151936)),
            *(drawn_rows(seed, (1, 4096), (8192, 262144), 2**28, 8**seed) for seed in (0, 1, 2)),
        ],
        inputs=lambda random, shape: (random(shape),),
        libraries={"Liger": attrgetter("liger_softmax")},
    ),
]
