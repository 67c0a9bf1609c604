"""Workloads of fusion/cross_entropy_in_place beside other libraries."""

from operator import attrgetter
from typing import Any

from benchmarks.cross_entropy import LIGER, LOGITS, logits_and_targets
from triton_gallery.libraries.workload import Function, Workload


def loss_and_gradient(function: Function) -> Function:
    """Return a call for a loss and its gradient, given a function that computes the loss."""

    def call(logits: Any, targets: Any) -> Any:
        import torch

        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = function(logits, targets)
        return loss, torch.autograd.grad(loss, logits)[0]

    return call


def over_the_logits(module: Any) -> Function:
    """Return a call for a loss and what stands in the place of the logits."""
    return lambda logits, targets: (module.cross_entropy_in_place_(logits, targets), logits)


WORKLOADS = [
    Workload(
        "fusion/cross_entropy_in_place",
        variant=variant,
        ours=over_the_logits,
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=shapes,
        inputs=lambda random, shape: tuple(tensor.detach() for tensor in logits_and_targets(random, shape)),
        backward=None,
        libraries={"Liger": attrgetter("liger_cross_entropy")},
        called=loss_and_gradient,
        dtype=dtype,
    )
    for variant, shapes, dtype in (
        ("loss and gradient", LOGITS, "bfloat16"),
        ("float32, Liger's sizes, loss and gradient", LIGER, "float32"),
    )
]
