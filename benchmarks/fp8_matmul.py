"""Workloads of low_precision/fp8_matmul: beside PyTorch's own product of float8, and a layer beside one of 16 bits."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

from collections.abc import Callable
from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Product, Workload, layers

# Of models, and sizes that are no powers of two
SHAPES = [(M, N, K) for M, K, N in layers(16, 64, 1024, 4096, 16384)]
SHAPES += [(8192, 8192, 8192), (4096, 7168, 16384), (4096, 2112, 7168), (500, 5000, 1792), (40, 7000, 4096)]


def operations(shape: tuple[int, ...], itemsize: int) -> Product:
    """Return the operations of a product."""
    M, N, K = shape
    return Product(M=M, N=N, K=K)


def inputs(random: Callable[..., Any], shape: tuple[int, ...], rows: bool) -> tuple[Any, ...]:
    """Return float8 matrices, and a scale for each or for each of its rows."""
    import torch

    M, N, K = shape
    x, weight = (random(size).detach().to(torch.float8_e4m3fn) for size in ((M, K), (N, K)))
    scales = (torch.rand(size if rows else 1, 1, device=x.device) + 0.5 for size in (M, N))
    return x, weight, *scales


def in_torch(torch: Any) -> Callable[..., Any]:
    """Return PyTorch's product."""

    def product(x: Any, weight: Any, scale_x: Any, scale_weight: Any) -> Any:
        scales = (scale_x, scale_weight.T) if len(scale_x) > 1 else (scale_x[0, 0], scale_weight[0, 0])
        return torch._scaled_mm(x, weight.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    return product


WORKLOADS = [
    Workload(
        "low_precision/fp8_matmul",
        variant=variant,
        ours=lambda op: op.fp8_matmul,
        torch=in_torch,
        compiles=False,
        shapes=SHAPES,
        inputs=partial(inputs, rows=rows),
        forward=operations,
        backward=None,
    )
    for variant, rows in (("per tensor", False), ("per row", True))
]
