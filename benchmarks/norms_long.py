"""Workloads of fusion/norms_long beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import Function, Workload, drawn_rows


def layer_norm(torch: Any) -> Function:
    """Return the norm of each row."""
    return lambda x, *args: torch.nn.functional.layer_norm(x, x.shape[-1:], *args)


def rms_norm(torch: Any) -> Function:
    """Return each row over its root mean square."""
    return lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


WORKLOADS = [
    Workload(
        "fusion/norms_long",
        ours=attrgetter("norms_long_layer_norm"),
        torch=layer_norm,
        shapes=[
            *((4096, 20480), (4096, 32768), (1024, 131072), (64, 200704)),
            *(drawn_rows(seed, (1, 4096), (16384, 262144), 2**28, 8**seed) for seed in (0, 1, 2)),
        ],
        inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_layer_norm")},
    ),
    Workload(
        "fusion/norms_long",
        ours=attrgetter("norms_long_rms_norm"),
        torch=rms_norm,
        shapes=[(4096, 32768), (1024, 131072)],
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_rms_norm")},
        variant="rms_norm",
    ),
    Workload(
        "fusion/norms_long",
        ours=attrgetter("norms_long_rms_norm"),
        torch=rms_norm,
        # Of an older version of Liger-Kernel's benchmark/scripts/benchmark_rms_norm.py: what rms_norm does not take.
        shapes=[(2048, 32768)],
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_rms_norm")},
        variant="rms_norm, Liger's sizes",
    ),
]
