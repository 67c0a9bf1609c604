"""Workloads of fusion/cross_entropy beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import COPY, Function, Workload, tensors

LOGITS = [
    *((1, 128256), (8, 151936), (64, 50257), (64, 128256), (2048, 32000)),
    *((4096, vocabulary) for vocabulary in (32000, 50257, 128256, 151936, 201088)),
    (32768, 32000),
]


def logits_and_targets(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return logits, and for each row the class that they hold least likely."""
    logits = random(shape)
    return logits, logits.detach().argmin(-1)


WORKLOADS = [
    Workload(
        "fusion/cross_entropy",
        ours=attrgetter("cross_entropy"),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=LOGITS,
        inputs=logits_and_targets,
        forward=tensors(1, 0),
        backward=COPY,
    ),
]
