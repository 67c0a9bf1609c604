"""Workloads of fusion/rms_norm beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import Function, Workload, drawn_rows, hidden, tensors


def norm(torch: Any) -> Function:
    """Return the norm of each row."""
    return lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def norm_residual(torch: Any) -> Function:
    """Return the norm of each row of a sum, and the sum."""

    def function(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        h = x + residual
        return norm(torch)(h, weight, eps), h

    return function


# Of Liger-Kernel's benchmark/scripts/benchmark_rms_norm.py: Llama 3 8B at the fewest and the most tokens; and,
# of its older version, 2048 tokens of the least hidden size, and of the largest that rms_norm takes.
LIGER = [(1024, 4096), (8192, 4096), (2048, 1024), (2048, 16384)]
# Of Liger-Kernel's benchmark/scripts/benchmark_fused_add_rms_norm.py, whose older version has float32.
LIGER_RESIDUAL = [
    ("residual, Liger's sizes", "bfloat16", LIGER[:2]),
    ("float32, residual, Liger's sizes", "float32", LIGER[2:]),
]
WORKLOADS = [
    Workload(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm"),
        torch=norm,
        shapes=[
            *((131072, size) for size in (64, 128, 256)),
            *hidden((4096, 1024), (4096, 8192), (32768, 4096), (16384, 16384)),
        ],
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_rms_norm")},
    ),
    Workload(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm"),
        torch=norm,
        shapes=[(4096, 2880), (32768, 4096)],
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_rms_norm")},
        variant="float32",
        dtype="float32",
    ),
    Workload(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm_residual"),
        torch=norm_residual,
        shapes=[
            *((40, 4096), (4096, 2880), (4096, 7168), (4096, 12288), (32768, 4096)),
            *(drawn_rows(seed, (1, 32768), (512, 16384), 2**27, 8**seed) for seed in (0, 1, 2)),
        ],
        inputs=lambda random, shape: (random(shape), random(shape), random(shape[-1:])),
        constants=(1e-6,),
        forward=tensors(2, 2),
        backward=tensors(3, 1),
        libraries={"Liger": attrgetter("liger_fused_add_rms_norm")},
        variant="residual",
    ),
    Workload(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm"),
        torch=norm,
        shapes=LIGER,
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        libraries={"Liger": attrgetter("liger_rms_norm")},
        variant="Liger's sizes",
    ),
    *(
        Workload(
            "fusion/rms_norm",
            ours=attrgetter("rms_norm_residual"),
            torch=norm_residual,
            shapes=shapes,
            inputs=lambda random, shape: (random(shape), random(shape), random(shape[-1:])),
            constants=(1e-6,),
            forward=tensors(2, 2),
            backward=tensors(3, 1),
            libraries={"Liger": attrgetter("liger_fused_add_rms_norm")},
            variant=variant,
            dtype=dtype,
        )
        for variant, dtype, shapes in LIGER_RESIDUAL
    ),
]
