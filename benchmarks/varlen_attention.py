"""Workloads of attention/varlen_attention beside other libraries."""

import inspect
import math
from itertools import accumulate
from typing import Any

from triton_gallery.libraries.workload import Amount, Function, Product, Workload

# Sequences, the longest of them, heads and their dimension
SHAPES = [(64, longest, 512 // head, head) for head in (64, 128) for longest in (1024, 4096, 8192)]


def lengths_of(shape: tuple[int, ...]) -> list[int]:
    """Return lengths that grow from a 64th of the longest to the longest by equal factors."""
    count, longest = shape[:2]
    return [max(1, round(longest / 64 ** (1 - n / max(1, count - 1)))) for n in range(count)]


def packed(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return q, k, v, where each sequence begins, the row of each padded token, and the padded place of each row."""
    import torch

    lengths = lengths_of(shape)
    x = [random((sum(lengths), *shape[2:])) for _ in range(3)]
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    tokens = torch.arange(max(lengths))
    rows = (begins[:-1, None] + tokens).clamp(max=begins[-1] - 1)
    places = (tokens < begins.diff()[:, None]).flatten().nonzero()[:, 0]
    return *x, *(index.to(x[0].device) for index in (begins, rows, places))


def by_padding(torch: Any) -> Function:
    """Return attention of the padded batch, with the copies that padding takes; a model makes its indices once."""

    def attention(q: Any, k: Any, v: Any, begins: Any, rows: Any, places: Any) -> Any:
        padded = [t[rows].transpose(1, 2) for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*padded, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)[places]

    return attention


def flash(nn: Any) -> Function:
    """Return PyTorch's attention of packed sequences, given `torch.nn`."""
    from torch.nn.attention.varlen import varlen_attn

    window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if window else {"is_causal": True}
    return lambda q, k, v, begins, rows, places: varlen_attn(
        q, k, v, begins, begins, rows.shape[1], rows.shape[1], **causal
    )


def products(factor: float) -> Amount:
    """Return a product of as many operations: two for each pair of query and key, of which a mask leaves half."""

    def amount(shape: tuple[int, ...], _: int) -> Product:
        pairs = sum(length**2 for length in lengths_of(shape)) / 2
        size = factor * 2 * pairs * math.prod(shape[2:])
        side = 64 * max(1, round(size ** (1 / 3) / 64))  # nearly a cube: an odd inner side would be no roof
        return Product(round(size / side**2), side, side)

    return amount


WORKLOADS = [
    Workload(
        "attention/varlen_attention",
        ours=lambda recipe: (
            lambda q, k, v, begins, rows, places: recipe.varlen_attention(
                q, k, v, begins, begins, rows.shape[1], rows.shape[1], True
            )
        ),
        torch=by_padding,
        shapes=SHAPES,
        inputs=packed,
        forward=products(1),
        backward=products(2.5),
        libraries={"FlashAttention-2": flash},
        variant="causal",
        dtype="float16",
    ),
]
