"""Workloads of fusion/swiglu beside other libraries."""

from functools import partial
from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import ADD, Function, Workload, tensors


def of_halves(torch: Any) -> Function:
    """Return SwiGLU of a whole projection."""

    def function(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return function


# Of the MLPs of Liger-Kernel's benchmark/scripts/benchmark_swiglu.py and benchmark_geglu.py: Llama 3 8B at the fewest
# and the most tokens, and the widest of their models; and, of an older version, the fewest and the most tokens.
LIGER = [(1024, 14336), (8192, 14336), (2048, 29568)]
LIGER_OLD = [(4096, 11008), (32768, 11008)]
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
    Workload(
        "fusion/swiglu",
        ours=attrgetter("swiglu"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
        shapes=[*LIGER, *LIGER_OLD],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=tensors(3, 2),
        libraries={"Liger": attrgetter("liger_swiglu")},
        variant="Liger's sizes",
    ),
    Workload(
        "fusion/swiglu",
        ours=lambda module: partial(module.swiglu, activation="gelu_tanh"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        shapes=LIGER,
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=tensors(3, 2),
        libraries={"Liger": attrgetter("liger_geglu")},
        variant="GEGLU, Liger's sizes",
    ),
]
