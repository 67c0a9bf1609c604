"""Workloads of fusion/softmax beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, drawn_rows

WORKLOADS = [
    Workload(
        "fusion/softmax",
        ours=attrgetter("softmax"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=[
            *((65536, size) for size in (128, 197, 1000)),
            *((4096, size) for size in (768, 2880, 4096, 7168, 10000, 12288, 14336, 16384)),
            (32768, 4096),
            *(drawn_rows(seed, (1, 65536), (128, 16384), 2**27, 8**seed) for seed in (0, 1, 2)),
        ],
        inputs=lambda random, shape: (random(shape),),
        libraries={"Liger": attrgetter("liger_softmax")},
    ),
]
