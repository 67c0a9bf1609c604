"""Workloads of low_precision/int4_matmul: beside weights of 16 bits, and beside PyTorch's own weights of 4 bits."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

from collections.abc import Callable
from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Amount, Bytes, Product, Workload, layers

GROUP = 128
LAYERS = [(M, N, K) for M, K, N in layers(1, 16) if K % GROUP == 0]  # rows, N, K


def inputs(random: Callable[..., Any], shape: tuple[int, ...], in_torch: bool = False) -> tuple[Any, ...]:
    """Return rows, packed codes with their scales and zero points, and the weights that they stand for.

    The last is a pair if PyTorch's own product takes it: codes as PyTorch packs them on a GPU, and their scales.
    """
    import torch

    M, N, K = shape
    x, groups = random((M, K)).detach(), max(1, K // GROUP)
    half = x.dtype if x.dtype.itemsize == 2 else torch.bfloat16
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device=x.device)
    scales = (random((groups, N)).detach() / 64).to(half)
    pairs = torch.stack([scales, torch.full_like(scales, 8)], -1)
    if in_torch and x.is_cuda:
        words = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        # A weight is (code - 8) * scale + zero there.
        return x, pack(codes), pairs, words, torch.stack([scales, torch.zeros_like(scales)], -1)
    weight = (codes.to(x.dtype) - 8).view(N, groups, -1) * scales.T[..., None].to(x.dtype)
    return x, pack(codes), pairs, weight.flatten(1)


def pack(codes: Any) -> Any:
    """Return codes as the op packs them, without importing it a second time."""
    import torch

    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 128))
    codes = codes.view(codes.shape[0], -1, 4, 4, 4, 2).permute(1, 0, 4, 2, 3, 5)  # blocks, N, t, i, c, h
    words = sum(codes[..., c, h].int() << 4 * c + 16 * h for c in range(4) for h in range(2))
    return words.flatten(2)


def product_of_torch(torch: Any) -> Callable[..., Any]:
    """Return PyTorch's product with weights of 4 bits, which a GPU has, or else with those of 16."""

    def product(x: Any, packed: Any, pairs: Any, weight: Any, *scales: Any) -> Any:
        if not x.is_cuda:
            return torch.nn.functional.linear(x, weight)
        return torch._weight_int4pack_mm(x, weight, GROUP, *scales)

    return product


def product_in_16_bits(torch: Any) -> Callable[..., Any]:
    """Return the product with weights of 16 bits."""
    return lambda x, packed, pairs, weight: torch.nn.functional.linear(x, weight)


def floor(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: codes, scales and zero points, rows and results."""
    M, N, K = shape
    return Bytes(N * K / 2 + 2 * itemsize * N * K / GROUP + itemsize * M * K, itemsize * M * N)


def operations(shape: tuple[int, ...], itemsize: int) -> Product:
    """Return the operations of a product."""
    M, N, K = shape
    return Product(M=M, N=N, K=K)


KINDS: list[tuple[str, list[tuple[int, int, int]], Amount]] = [
    ("few rows", [(M, 8192, 8192) for M in (1, 4, 16, 64)] + LAYERS, floor),
    ("beside PyTorch's 4 bits", [(M, 8192, 8192) for M in (1, 4, 16, 64)], floor),
    ("many rows", [(M, 8192, 8192) for M in (128, 256, 512, 1024, 4096)], operations),
]
WORKLOADS = [
    Workload(
        "low_precision/int4_matmul",
        variant=variant,
        ours=lambda op: lambda x, packed, pairs, *others: op.int4_matmul(x, packed, pairs),
        torch=product_of_torch if "PyTorch" in variant else product_in_16_bits,
        compiles="PyTorch" not in variant,
        shapes=shapes,
        inputs=partial(inputs, in_torch=True) if "PyTorch" in variant else inputs,
        forward=forward,
        backward=None,
    )
    for variant, shapes, forward in KINDS
]
