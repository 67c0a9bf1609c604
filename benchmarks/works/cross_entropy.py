"""The works of fusion/cross_entropy beside other libraries."""

from operator import attrgetter
from typing import Any

from work import COPY, Function, Work, tensors


def loss_and_gradient(function: Function) -> Function:
    """Return a call for a loss and its gradient, given a function that computes the loss."""

    def call(logits: Any, target: Any) -> Any:
        import torch

        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = function(logits, target)
        return loss, torch.autograd.grad(loss, logits)[0]

    return call


def logits_and_targets(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return logits, and for each row the class that they hold least likely."""
    logits = random(shape)
    return logits, logits.detach().argmin(-1)


WORKS = [
    Work(
        "fusion/cross_entropy",
        ours=attrgetter("cross_entropy"),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=[(8, 151936), (2048, 32000), (2048, 50257), (4096, 128256)],
        inputs=logits_and_targets,
        forward=tensors(1, 0),
        backward=COPY,
    ),
    Work(
        "fusion/cross_entropy",
        variant="loss and gradient",
        ours=lambda module: lambda logits, target: (module.cross_entropy_(logits, target), logits),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=[(8, 151936), (2048, 32000), (2048, 50257), (4096, 128256)],
        inputs=lambda random, shape: tuple(tensor.detach() for tensor in logits_and_targets(random, shape)),
        backward=None,
        peers={"Liger": attrgetter("liger_cross_entropy")},
        called=loss_and_gradient,
    ),
]
