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
    """Return float8 matrices, and a scale for each or for each of its rows; then the weight as PyTorch takes it.

    PyTorch takes a weight with a multiple of 16 rows.
    """
    import torch

    M, N, K = shape
    whole_N = -(-N // 16) * 16
    x, whole = (random(size).detach().to(torch.float8_e4m3fn) for size in ((M, K), (whole_N, K)))
    scale_x, scale_whole = (torch.rand(size if rows else 1, 1, device=x.device) + 0.5 for size in (M, whole_N))
    return x, whole[:N], scale_x, scale_whole[:N], whole, scale_whole


def in_torch(torch: Any) -> Callable[..., Any]:
    """Return PyTorch's product."""

    def product(x: Any, weight: Any, scale_x: Any, scale_weight: Any, whole: Any, scale_whole: Any) -> Any:
        scales = (scale_x, scale_whole.T) if len(scale_x) > 1 else (scale_x[0, 0], scale_whole[0, 0])
        out = torch._scaled_mm(x, whole.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out[:, : len(weight)]

    return product


WORKLOADS = [
    Workload(
        "low_precision/fp8_matmul",
        variant=variant,
        ours=lambda op: lambda *tensors: op.fp8_matmul(*tensors[:4]),
        torch=in_torch,
        compiles=False,
        shapes=SHAPES,
        inputs=partial(inputs, rows=rows),
        forward=operations,
        backward=None,
    )
    for variant, rows in (("per tensor", False), ("per row", True))
]
