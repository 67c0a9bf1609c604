"""Workloads of fusion/linear_cross_entropy beside other libraries."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Function, Product, Workload

SHAPES = [(8192, 768, 50257), (8192, 4096, 32000), (8192, 4096, 128256), (8192, 2880, 201088)]
# Of Liger-Kernel's benchmark/scripts/benchmark_fused_linear_cross_entropy.py: Llama 3 8B at the fewest tokens, and the
# widest of its models with the largest vocabulary. Llama 3 8B at the most tokens is above.
LIGER = [(1024, 4096, 128256), (2048, 8192, 152064)]


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return tokens, a weight that makes logits of about 1, and for each token a word."""
    import torch

    T, D, V = shape  # noqa: N806 - tokens, features, words, as in the recipe
    x, weight = random((T, D)).detach(), random((V, D)).detach() * D**-0.5
    return x, weight, torch.arange(T, device=x.device) * 7919 % V


def products(shape: tuple[int, ...], _: int, number: int) -> Product:
    """Return a product of as many operations as so many of tokens and weight."""
    T, D, V = shape  # noqa: N806
    return Product(T, V, number * D)


def loss_and_gradients(function: Function) -> Function:
    """Return a call for a loss and its gradients, given a function that computes the loss."""

    def call(x: Any, weight: Any, targets: Any) -> tuple[Any, ...]:
        import torch

        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        with torch.enable_grad():
            loss = function(*leaves, targets)
        return loss, *torch.autograd.grad(loss, leaves)

    return call


def plain(torch: Any) -> Function:
    """Return PyTorch's two functions."""
    functional = torch.nn.functional
    return lambda x, weight, targets: functional.cross_entropy(functional.linear(x, weight), targets)


def of_torch(module: ModuleType) -> Function:
    """Return PyTorch's own op, which takes chunks if asked to."""
    return lambda x, weight, targets: module.functional.linear_cross_entropy(
        x, weight, targets, options=module.LinearCrossEntropyOptions()
    )


def of_liger(module: ModuleType) -> Function:
    """Return Liger's op."""
    return lambda x, weight, targets: module.liger_fused_linear_cross_entropy(x, weight, targets)


def work(variant: str, number: int, called: Function, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Workload:
    """Return the work of a loss, or of a loss and its gradients, which take so many products."""
    return Workload(
        "fusion/linear_cross_entropy",
        variant=variant,
        ours=lambda module: called(module.linear_cross_entropy),
        torch=plain,
        shapes=shapes,
        inputs=inputs,
        forward=partial(products, number=number),
        backward=None,
        libraries={"Liger": of_liger, "PyTorch in chunks": of_torch},
        called=called,
    )


WORKLOADS = [
    work("loss", 1, lambda function: function),
    work("loss and gradients", 3, loss_and_gradients),
    work("Liger's sizes, loss", 1, lambda function: function, LIGER),
    work("Liger's sizes, loss and gradients", 3, loss_and_gradients, LIGER),
]
