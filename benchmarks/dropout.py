"""Workloads of fusion/dropout beside other libraries."""

from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import COPY, Function, Workload


def seeded(module: ModuleType) -> Function:
    """Return our dropout with a seed that is on the device already."""
    seed = module.dropout_seed(module.DEVICE)
    return lambda x, p: module.dropout(x, p, seed)


def kept_by_both(got: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results of dropout, each with its own mask, under both masks."""
    both = (got != 0) & (ours != 0)
    return got[both], ours[both]


WORKLOADS = [
    Workload(
        "fusion/dropout",
        ours=seeded,
        torch=lambda torch: torch.nn.functional.dropout,
        shapes=[(1, 4096), (128, 4096), (4096, 768), (4096, 2880), (4096, 4096), (4096, 7168), (8192, 14336)],
        inputs=lambda random, shape: (random(shape),),
        constants=(0.1,),
        backward=COPY,
        alike=kept_by_both,
    ),
]
