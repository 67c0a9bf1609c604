"""Workloads of low_precision/mx_matmul: MXFP8, MXFP4 weights beside 16-bit activations, and NVFP4."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

from collections.abc import Callable
from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Product, Workload

# N and K of layers: of gpt-oss's experts, of DeepSeek-V3's attention, of Llama 3 with 8 and with 70 billion parameters
LAYERS = [(5760, 2880), (2112, 7168), (7168, 2048), (6144, 4096), (57344, 8192)]
TOKENS = (1, 16, 64, 1024, 4096)
SHAPES = [(M, N, K) for N, K in LAYERS for M in TOKENS]
SHAPES += [(M, 5000, 1792) for M in (21, 108, 996, 2485, 7809)]  # drawn at random
SHAPES += [(8192, 8192, 8192)]


def operations(shape: tuple[int, ...], itemsize: int) -> Product:
    """Return the operations of a product."""
    M, N, K = shape
    return Product(M=M, N=N, K=K)


def inputs(kinds: tuple[str, str], random: Callable[..., Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return x and weight, each "e4m3", "e2m1" or "bf16", and their scales, of NVFP4 where both are "e2m1"."""
    import torch

    M, N, K = shape
    nv, made = kinds == ("e2m1", "e2m1"), []
    for rows, kind in zip((M, N), kinds, strict=True):
        x = random((rows, K)).detach()
        if kind == "bf16":
            made.append((x, None))
            continue
        if kind == "e4m3":
            x = x.to(torch.float8_e4m3fn)
        else:
            x = torch.randint(0, 256, (rows, K // 2), device=x.device, dtype=torch.uint8)
        scale = random((rows, K // (16 if nv else 32))).detach().abs() + 0.5
        if not nv:
            scale = torch.exp2(scale.float().round()).to(torch.float8_e8m0fnu)
        made.append((x, scale.to(torch.float8_e4m3fn) if nv else scale))
    (x, scale_x), (weight, scale_weight) = made
    return x, weight, scale_x, scale_weight


def numbers(torch: Any, x: Any, scale: Any) -> Any:
    """Return what numbers and scales stand for, in bfloat16."""
    if scale is None:
        return x
    if x.dtype == torch.uint8:
        values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        table = torch.tensor(values + [-value for value in values], device=x.device)
        x = table[torch.stack([x & 15, x >> 4], -1).flatten(-2).int()]
    blocks = x.float().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale.float()[..., None]).flatten(-2).bfloat16()


def in_torch(torch: Any) -> Callable[..., Any]:
    """Return a product of what the matrices stand for."""

    def product(x: Any, weight: Any, scale_x: Any, scale_weight: Any) -> Any:
        return numbers(torch, x, scale_x) @ numbers(torch, weight, scale_weight).T

    return product


WORKLOADS = [
    Workload(
        "low_precision/mx_matmul",
        variant=variant,
        ours=lambda op: op.mx_matmul,
        torch=in_torch,
        compiles=False,
        shapes=SHAPES,
        inputs=partial(inputs, kinds),
        forward=operations,
        backward=None,
    )
    for variant, kinds in {
        "MXFP8": ("e4m3", "e4m3"),
        "MXFP4 weights": ("bf16", "e2m1"),
        "NVFP4": ("e2m1", "e2m1"),
    }.items()
]
