"""Workloads of low_precision/block_scaled_matmul: beside PyTorch's own product with such scales."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

from collections.abc import Callable
from typing import Any

from triton_gallery.libraries.workload import Product, Workload

GROUP = 128
# N and K of layers: of DeepSeek-V3's attention and experts, of Llama 3 with 8 and with 70 billion parameters
LAYERS = [(2112, 7168), (24576, 1536), (7168, 16384), (7168, 2048), (6144, 4096), (57344, 8192)]
TOKENS = (16, 64, 1024, 4096, 16384)
SHAPES = [(M, N, K) for N, K in LAYERS for M in TOKENS]
SHAPES += [(M, 5000, 1792) for M in (21, 50, 108, 266, 996, 1659, 2485, 7809, 11733)]  # drawn at random
SHAPES += [(8192, 8192, 8192)]


def operations(shape: tuple[int, ...], itemsize: int) -> Product:
    """Return the operations of a product."""
    M, N, K = shape
    return Product(M=M, N=N, K=K)


def rounded_up(number: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-number // unit) * unit


def inputs(random: Callable[..., Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return float8 matrices and their scales, then these as PyTorch takes them.

    PyTorch takes a weight with a multiple of 16 rows, and scales by columns, those of the weight with a multiple of
    four in each column. We round up the rows of x too, so that each column of its scales begins at 16 bytes.
    """
    import torch

    M, N, K = shape
    K = rounded_up(K, GROUP)
    groups, blocks = K // GROUP, rounded_up(N, GROUP) // GROUP
    rows = rounded_up(M, 4), rounded_up(N, 16)
    x, weight = (random((length, K)).detach().to(torch.float8_e4m3fn) for length in rows)
    scale_x = (torch.rand(groups, rows[0], device=x.device) + 0.5).T
    scale_weight = (torch.rand(blocks, rounded_up(groups, 4), device=x.device) + 0.5).T
    ours = x[:M], weight[:N], scale_x[:M], scale_weight[:groups].T
    return *ours, x, weight, scale_x, scale_weight


def in_torch(torch: Any) -> Callable[..., Any]:
    """Return PyTorch's product, which a GPU has, or else one of what the matrices stand for."""

    def product(x: Any, weight: Any, scale_x: Any, scale_weight: Any, *whole: Any) -> Any:
        if not x.is_cuda:
            scales = scale_weight.repeat_interleave(GROUP, 0)[: len(weight)]
            pairs = (x, scale_x), (weight, scales)
            x, weight = (t.float() * scale.repeat_interleave(GROUP, 1) for t, scale in pairs)
            return (x @ weight.T).bfloat16()
        kinds = torch.nn.functional.ScalingType
        whole_x, whole_weight, scale_x, scale_weight = whole
        scales = scale_x, kinds.BlockWise1x128, scale_weight, kinds.BlockWise128x128
        return torch.nn.functional.scaled_mm(whole_x, whole_weight.T, *scales)[: len(x), : len(weight)]

    return product


WORKLOADS = [
    Workload(
        "low_precision/block_scaled_matmul",
        ours=lambda op: (
            lambda x, weight, scale_x, scale_weight, *whole: op.block_scaled_matmul(x, weight, scale_x, scale_weight)
        ),
        torch=in_torch,
        compiles=False,
        shapes=SHAPES,
        inputs=inputs,
        forward=operations,
        backward=None,
    )
]
