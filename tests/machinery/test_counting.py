"""What lessons count: the statements of kernels, and the bytes that operators move."""

from types import SimpleNamespace

import torch

from triton_gallery.counting import Traffic, statements


def documented(length: int) -> int:
    """Return the first number that is not zero."""
    for number in range(length):
        if number:
            return number
    return 0


def plain(length: int) -> int:
    return length


def test_statements() -> None:
    """Those of the bodies count, at any depth; heads and docstrings do not."""
    first, second = (SimpleNamespace(fn=function) for function in (documented, plain))
    assert [statements(first), statements(second), statements(first, second)] == [4, 1, 5]


def test_traffic() -> None:
    """Tensors in lists count, and those that are written in place; views and empty tensors do not."""
    x = torch.ones(4, 8)
    with Traffic() as traffic:
        y = (x * torch.empty_like(x)).view(-1)
        torch.cat([y, y])
        x.add_(1)
    assert traffic.operators == [
        ("aten.mul.Tensor", 256, 128),
        ("aten.cat.default", 256, 256),
        ("aten.add_.Tensor", 128, 128),
    ]
    assert traffic.moved == 1152
