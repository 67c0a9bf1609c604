"""Workloads of fusion/softmax beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, drawn_rows

# Of Liger-Kernel's benchmark/scripts/benchmark_softmax.py: Llama 3 8B at the fewest and the most tokens, and the widest
# of its models; and, of its older version, 2048 rows of the least, a middle and the largest length.
LIGER = [
    ("Liger's sizes", "bfloat16", [(1024, 4096), (8192, 4096), (2048, 8192), (2048, 128)]),
    ("float32, Liger's sizes", "float32", [(2048, 128), (2048, 1024), (2048, 4096)]),
]
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
    *(
        Workload(
            "fusion/softmax",
            ours=attrgetter("softmax"),
            torch=lambda torch: lambda x: torch.softmax(x, -1),
            shapes=shapes,
            inputs=lambda random, shape: (random(shape),),
            libraries={"Liger": attrgetter("liger_softmax")},
            variant=variant,
            dtype=dtype,
        )
        for variant, dtype, shapes in LIGER
    ),
]
