"""Workloads of fusion/cross_entropy beside other libraries."""

from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import COPY, Function, Workload, tensors

LOGITS = [
    *((1, 128256), (8, 151936), (64, 50257), (64, 128256), (2048, 32000)),
    *((4096, vocabulary) for vocabulary in (32000, 50257, 128256, 151936, 201088)),
    (32768, 32000),
]
# Of Liger-Kernel's benchmark/scripts/benchmark_cross_entropy.py, in float32: Llama 3 8B at the fewest and the most
# tokens, and the largest vocabulary; and, of its older version, 16384 tokens of the least and the largest one.
LIGER = [(1024, 128256), (8192, 128256), (2048, 152064), (16384, 4096), (16384, 131072)]


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
    Workload(
        "fusion/cross_entropy",
        ours=attrgetter("cross_entropy"),
        torch=lambda torch: torch.nn.functional.cross_entropy,
        shapes=LIGER,
        # Liger computes the gradients together with the loss, unless the logits need none.
        inputs=lambda random, shape: tuple(tensor.detach() for tensor in logits_and_targets(random, shape)),
        forward=tensors(1, 0),
        backward=None,
        libraries={"Liger": attrgetter("liger_cross_entropy")},
        variant="float32, Liger's sizes",
        dtype="float32",
    ),
]
