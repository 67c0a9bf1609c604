"""The works of attention/varlen_attention beside other libraries."""

import inspect
import math
from itertools import accumulate
from typing import Any

from work import Amount, Function, Product, Work

# Sequences, the longest of them, heads and their dimension
SHAPES = [(64, longest, 512 // head, head) for head in (64, 128) for longest in (1024, 4096, 8192)]


def lengths_of(shape: tuple[int, ...]) -> list[int]:
    """Return lengths that grow from a 64th of the longest to the longest by equal factors."""
    count, longest = shape[:2]
    return [max(1, round(longest / 64 ** (1 - n / max(1, count - 1)))) for n in range(count)]


def packed(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return q, k, v, where each sequence begins, and the places in the longest, whose number the CPU knows."""
    import torch

    lengths = lengths_of(shape)
    x = [random((sum(lengths), *shape[2:])) for _ in range(3)]
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=x[0].device)
    return *x, begins, torch.arange(max(lengths), device=x[0].device)


def by_padding(torch: Any) -> Function:
    """Return attention of the padded batch, with the copies that padding takes."""

    def attention(q: Any, k: Any, v: Any, begins: Any, places: Any) -> Any:
        rows = (begins[:-1, None] + places).clamp(max=len(q) - 1)
        padded = [t[rows].transpose(1, 2) for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*padded, is_causal=True)
        # Where each token stands among the padded ones
        seq = torch.searchsorted(begins[1:], torch.arange(len(q), device=q.device), right=True)
        own = torch.arange(len(q), device=q.device) - begins[seq]
        return out.transpose(1, 2)[seq, own]

    return attention


def flash(nn: Any) -> Function:
    """Return PyTorch's attention of packed sequences, given `torch.nn`."""
    from torch.nn.attention.varlen import varlen_attn

    window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if window else {"is_causal": True}
    return lambda q, k, v, begins, places: varlen_attn(q, k, v, begins, begins, len(places), len(places), **causal)


def products(factor: float) -> Amount:
    """Return a product of as many operations: two for each pair of query and key, of which a mask leaves half."""

    def amount(shape: tuple[int, ...], _: int) -> Product:
        side = 8192
        pairs = sum(length**2 for length in lengths_of(shape)) / 2
        return Product(side, side, max(1, round(factor * 2 * pairs * math.prod(shape[2:]) / side**2)))

    return amount


WORKS = [
    Work(
        "attention/varlen_attention",
        ours=lambda recipe: (
            lambda q, k, v, begins, places: recipe.varlen_attention(
                q, k, v, begins, begins, len(places), len(places), True
            )
        ),
        torch=by_padding,
        shapes=SHAPES,
        inputs=packed,
        forward=products(1),
        backward=products(2.5),
        peers={"FlashAttention-2": flash},
        variant="causal",
        dtype="float16",
    ),
]
