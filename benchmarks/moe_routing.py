"""Workloads of experts/moe_routing: from logits to weights, experts, order, inverse and offsets."""

# ruff: noqa: N806 - T tokens and E experts, as in the recipe

from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload, floats

GROUPS, TOP, SCALE = 8, 4, 2.5  # of DeepSeek-V3


def inputs(random: Function, shape: tuple[int, ...], biased: bool = False) -> tuple[Any, ...]:
    """Return logits, and a bias where it is asked for."""
    import torch

    logits = random(shape).detach()
    return (logits, random(shape[1:], dtype=torch.float32).detach() / 16) if biased else (logits,)


def softmax_of_torch(torch: Any) -> Function:
    """Return the choice of Mixtral and Qwen3-MoE, and the sort."""

    def route(logits: Any, k: int) -> Any:
        weights, experts = logits.float().softmax(-1).topk(k)
        return weights / weights.sum(-1, keepdim=True), experts.int(), *sort(torch, experts, logits.shape[1])

    return route


def deepseek_of_torch(torch: Any) -> Function:
    """Return the choice of DeepSeek-V3, and the sort."""

    def route(logits: Any, bias: Any, k: int) -> Any:
        scores = logits.float().sigmoid()
        by_group = (scores + bias).unflatten(1, (GROUPS, -1))
        kept = by_group.topk(2).values.sum(-1).topk(TOP).indices
        dropped = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, kept, False)
        experts = by_group.masked_fill(dropped[..., None], -torch.inf).flatten(1).topk(k).indices
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True) * SCALE
        return weights, experts.int(), *sort(torch, experts, logits.shape[1])

    return route


def sort(torch: Any, experts: Any, count: int) -> tuple[Any, Any, Any]:
    """Return order, inverse and offsets."""
    flat = experts.flatten()
    order = flat.sort(stable=True).indices
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.zeros(count, dtype=torch.int32, device=flat.device)
    ends = ends.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    return order.int(), inverse.int(), ends


def deepseek(module: ModuleType) -> Function:
    """Return our op with the options of DeepSeek-V3."""
    op = module.moe_routing_with_permutation
    return lambda logits, bias, k: op(logits, k, "sigmoid", bias, GROUPS, TOP, True, SCALE)


def nearly(output: Any, ours: Any) -> tuple[Any, Any]:
    """Return 1 and the share of tokens whose weights differ, and 1: either of two sums nearly equal may be larger."""
    if not output.is_floating_point():
        return ours, ours
    share = ((output - ours).abs().amax(-1) > 1e-3).float().mean().round(decimals=2)
    return 1 + share, 1 + 0 * share


def moved(shape: tuple[int, ...], itemsize: int, k: int) -> Bytes:
    """Return the bytes: logits in; weights, experts, order and inverse out, 4 bytes each, and offsets."""
    T, E = shape
    return Bytes(itemsize * T * E, 16 * T * k + 4 * E)


TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
WORKLOADS = [
    *(
        Workload(
            "experts/moe_routing",
            variant=f"{k} of {E}",
            ours=attrgetter("moe_routing_with_permutation"),
            torch=softmax_of_torch,
            shapes=[(T, E) for T in tokens],
            inputs=inputs,
            constants=(k,),
            forward=partial(moved, k=k),
            backward=None,
            alike=floats,
        )
        for E, k, tokens in ((256, 8, TOKENS), (8, 2, (16, 1024, 16384)), (60, 6, (16, 16384)), (512, 10, (16, 16384)))
    ),
    Workload(
        "experts/moe_routing",
        variant="8 of 256, as DeepSeek-V3",
        ours=deepseek,
        torch=deepseek_of_torch,
        shapes=[(T, 256) for T in TOKENS],
        inputs=partial(inputs, biased=True),
        constants=(8,),
        forward=partial(moved, k=8),
        backward=None,
        alike=nearly,
    ),
]
