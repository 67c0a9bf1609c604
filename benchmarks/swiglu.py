"""Workloads of fusion/swiglu beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import ADD, Function, Workload, tensors


def of_halves(torch: Any) -> Function:
    """Return SwiGLU of a whole projection."""

    def function(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return function


WORKLOADS = [
    Workload(
        "fusion/swiglu",
        ours=attrgetter("swiglu"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
        shapes=[(1, 14336), (128, 14336), (4096, 2880), (4096, 4864), (4096, 11008), (8192, 14336)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=tensors(3, 2),
        libraries={"Liger": attrgetter("liger_swiglu")},
    ),
    Workload(
        "fusion/swiglu",
        ours=attrgetter("swiglu_packed"),
        torch=of_halves,
        shapes=[(1, 14336), (4096, 1408), (4096, 2880), (4096, 11008), (8192, 14336)],
        inputs=lambda random, shape: (random((shape[0], 2 * shape[1])),),
        forward=ADD,
        backward=tensors(3, 2),
        variant="halves",
    ),
    Workload(
        "fusion/swiglu",
        ours=attrgetter("swiglu"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
        shapes=[(4096, 2880), (4096, 11008)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=tensors(3, 2),
        libraries={"Liger": attrgetter("liger_swiglu")},
        variant="float32",
        dtype="float32",
    ),
]
