"""Workloads of experts/load_balance: the auxiliary loss of a router, forward and backward."""

# ruff: noqa: N806 - T tokens and E experts, as in the recipe

from functools import partial
from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload


def inputs(random: Function, shape: tuple[int, ...], k: int) -> tuple[Any, Any]:
    """Return logits, and the experts that have the largest."""
    logits = random(shape)
    return logits, logits.detach().topk(k).indices.int()


def loss_of_torch(torch: Any) -> Function:
    """Return the loss of transformers, with a count that is deterministic."""

    def loss(logits: Any, experts: Any) -> Any:
        T, E = logits.shape
        flat = experts.flatten().long()
        counts = torch.zeros(E, dtype=torch.int32, device=flat.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return E * (counts / T * logits.float().softmax(-1).mean(0)).sum()

    return loss


def moved(shape: tuple[int, ...], itemsize: int, k: int) -> Bytes:
    """Return the bytes of the forward: logits and experts in."""
    T, E = shape
    return Bytes(itemsize * T * E + 4 * T * k, 0)


def moved_backward(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return the bytes of the backward: logits in, their gradient out."""
    T, E = shape
    return Bytes(itemsize * T * E, itemsize * T * E)


WORKLOADS = [
    Workload(
        "experts/load_balance",
        variant=f"{k} of {E}",
        ours=attrgetter("load_balance_loss"),
        torch=loss_of_torch,
        shapes=[(T, E) for T in (16384, 131072)],
        inputs=partial(inputs, k=k),
        forward=partial(moved, k=k),
        backward=moved_backward,
    )
    for E, k in ((8, 2), (128, 8), (256, 8))
]
