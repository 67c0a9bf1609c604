"""Workloads of fusion/softmax beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, hidden

WORKLOADS = [
    Workload(
        "fusion/softmax",
        ours=attrgetter("softmax"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=[
            *((65536, size) for size in (128, 197, 512, 1000)),
            *hidden((4096, 10000), (32768, 4096)),
        ],
        inputs=lambda random, shape: (random(shape),),
        libraries={"Liger": attrgetter("liger_softmax")},
    ),
]
