"""Workloads of fusion/layer_norm beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import Function, Workload, hidden


def norm(torch: Any) -> Function:
    """Return the norm of each row."""
    return lambda x, *args: torch.nn.functional.layer_norm(x, x.shape[-1:], *args)


# Of Liger-Kernel's benchmark/scripts/benchmark_layer_norm.py: Llama 3 8B at the fewest and the most tokens, and the
# widest of its models; and, of its older version, 4096 tokens of the least, a middle and the largest hidden size.
LIGER = [
    ("Liger's sizes", "bfloat16", [(1024, 4096), (8192, 4096), (2048, 8192)]),
    ("float32, Liger's sizes", "float32", [(4096, 1024), (4096, 4096), (4096, 16384)]),
]
WORKLOADS = [
    Workload(
        "fusion/layer_norm",
        ours=attrgetter("layer_norm"),
        torch=norm,
        shapes=[
            *hidden((4096, 1024), (4096, 8192), (1, 4096), (16, 2880), (64, 7168), (128, 4096)),
            *((32768, 4096), (16384, 16384)),
        ],
        inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_layer_norm")},
    ),
    Workload(
        "fusion/layer_norm",
        ours=attrgetter("layer_norm"),
        torch=norm,
        shapes=[(4096, 2880), (4096, 12288), (32768, 4096)],
        inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_layer_norm")},
        variant="float32",
        dtype="float32",
    ),
    *(
        Workload(
            "fusion/layer_norm",
            ours=attrgetter("layer_norm"),
            torch=norm,
            shapes=shapes,
            inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
            constants=(1e-6,),
            libraries={"Liger": attrgetter("liger_layer_norm")},
            variant=variant,
            dtype=dtype,
        )
        for variant, dtype, shapes in LIGER
    ),
]
