"""Workloads of experts/moe_layer: beside the same layer on PyTorch's grouped_mm, and decoding beside a copy."""

# ruff: noqa: N806 - T, E, k, H and F are sizes, as in the recipe

from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Product, Workload

# Tokens, experts, choices, hidden size and that of an expert: Mixtral, Qwen3-30B-A3B, and DeepSeek-V3 on eight GPUs
LAYERS = [(8192, 8, 2, 4096, 14336), (32768, 128, 8, 2048, 768), (8192, 128, 8, 2048, 768), (2048, 128, 8, 2048, 768)]
LAYERS += [(8192, 32, 2, 7168, 2048), (16384, 512, 10, 2048, 512)]
# A batch of decoding
DECODED = [(T, 256, 8, H, F) for H, F in ((2048, 768), (7168, 2048)) for T in (1, 8, 64)]
DECODED += [(256, 128, 8, 2048, 768), (8, 8, 2, 4096, 14336)]
# Sizes that no model has, drawn at random
DRAWN = [(5003, 40, 3, 1792, 5000), (9999, 99, 6, 2880, 1416), (3000, 17, 4, 3520, 1208), (20_000, 60, 4, 1216, 856)]


def chosen(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return weights and experts: drawn at random, the same for a shape each time."""
    import torch

    T, E, k, *_ = shape
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(0))
    weights, experts = scores.topk(k)
    return weights.softmax(-1), experts.int()


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return x, weights, experts, gate_up and down."""
    T, E, _, H, F = shape
    x, gate_up, down = random((T, H)), random((E, 2 * F, H)), random((E, H, F))
    weights, experts = (t.to(x.device) for t in chosen(shape))
    gate_up, down = ((t.detach() / n**0.5).requires_grad_(t.requires_grad) for t, n in ((gate_up, H), (down, F)))
    return x, weights.requires_grad_(x.requires_grad), experts, gate_up, down


def grouped(torch: Any) -> Function:
    """Return the layer of sorted copies and grouped products, given `torch`."""

    def layer(x: Any, weights: Any, experts: Any, gate_up: Any, down: Any) -> Any:
        (T, k), E, product = experts.shape, down.shape[0], torch.nn.functional.grouped_mm
        flat, order = experts.flatten().sort(stable=True)
        offsets = torch.searchsorted(flat, torch.arange(E, device=flat.device), right=True).int()
        inverse = order.argsort()
        gate, up = product(x[order // k], gate_up.mT, offs=offsets).chunk(2, dim=1)
        y = product(torch.nn.functional.silu(gate) * up, down.mT, offs=offsets)
        return (y[inverse].view(T, k, -1) * weights[:, :, None]).sum(1).to(x.dtype)

    return layer


def operations(shape: tuple[int, ...], itemsize: int, times: int = 1) -> Product:
    """Return the operations of so many layers, as those of one product."""
    T, _, k, H, F = shape
    return Product(M=T * k, N=3 * F, K=times * H)


def moved(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: the weights of chosen experts, x and the result."""
    T, _, _, H, F = shape
    some = chosen(shape)[1].unique().numel()
    return Bytes(itemsize * (3 * some * H * F + T * H), itemsize * T * H)


WORKLOADS = [
    Workload(
        "experts/moe_layer",
        ours=lambda op: op.moe_layer,
        torch=grouped,
        compiles=False,
        shapes=shapes,
        inputs=inputs,
        forward=forward,
        backward=partial(operations, times=2) if backward else None,
        variant=variant,
    )
    for variant, shapes, forward, backward in (
        ("", LAYERS, operations, True),
        ("decoding", DECODED, moved, False),
        ("drawn", DRAWN, operations, True),
    )
]
