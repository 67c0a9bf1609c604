"""What softmax has to be, and its gradient: shared by the tests of both softmaxes."""

import torch
from case import Draw, Exact


def exact(x: torch.Tensor) -> list[Exact]:
    """Return the softmax of rows."""
    return [Exact(torch.softmax(x, -1))]


def exact_gradient(grad: torch.Tensor, y: torch.Tensor) -> list[Exact]:
    """Return the gradient of rows, and the magnitudes that it adds up."""
    terms = y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True))
    return [Exact(y * (grad - (grad * y).sum(-1, keepdim=True)), terms)]


def of_rows(draw: Draw, *shape: int) -> tuple[torch.Tensor]:
    """Make rows."""
    return (draw(*shape),)


def gradient_and_rows(draw: Draw, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a gradient, and rows that softmax may have returned."""
    return draw(*shape), draw(*shape, of=lambda x: torch.softmax(x, -1))
