"""Workloads of attention/attention_variants beside other libraries."""

import functools
from typing import Any

from triton_gallery.libraries.workload import Amount, Function, Product, Workload

# Batch, heads, length and head: 16384 tokens in all. PyTorch's matrix of longer ones would not fit a GPU.
SHAPES = [(16384 // length, 2048 // head, length, head) for head in (64, 128) for length in (4096, 8192)]
WINDOW, CAP = 1024, 20.0


def pairs(length: int, window: bool) -> float:
    """Return how many scores of a head are seen."""
    return length**2 / 2 if not window else sum(min(i + 1, WINDOW) for i in range(length))


def products(number: int, window: bool) -> Amount:
    """Return a product of as many operations: so many for each score that is seen."""

    def amount(shape: tuple[int, ...], _: int) -> Product:
        batch, heads, length, head = shape
        side = 8192
        return Product(side, side, max(1, round(number * batch * heads * pairs(length, window) * head / side**2)))

    return amount


def by_pytorch(cap: bool, window: bool) -> Function:
    """Return the variant by PyTorch's operators, given the module `torch`; a matrix of scores is in memory."""

    def of(torch: Any) -> Function:
        def attention(q: Any, k: Any, v: Any) -> Any:
            i = torch.arange(q.shape[2], device=q.device)
            hidden = (i[:, None] < i) | ((i[:, None] - i >= WINDOW) & window)
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            scores = CAP * torch.tanh(scores / CAP) if cap else scores
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

        return attention

    return of


def by_flex(cap: bool, window: bool) -> Function:
    """Return the variant by compiled flex_attention, given the module `torch`."""

    def of(torch: Any) -> Function:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return CAP * torch.tanh(s / CAP)

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j <= i) & (i - j < WINDOW) if window else j <= i

        compiled = torch.compile(flex_attention, dynamic=False)

        @functools.cache
        def mask(length: int, device: Any) -> Any:
            return create_block_mask(seen, None, None, length, length, device)

        def attention(q: Any, k: Any, v: Any) -> Any:
            return compiled(q, k, v, capped if cap else None, mask(q.shape[2], q.device))

        return attention

    return of


def work(cap: bool, window: bool) -> Workload:
    """Return the work of attention with a causal mask, a cap of the scores or none, and a window or none."""
    score: Any = ("softcap", CAP) if cap else "plain"
    span: Any = ("window", WINDOW) if window else "causal"
    return Workload(
        "attention/attention_variants",
        ours=lambda recipe: lambda q, k, v: recipe.attention_variants(q, k, v, score, span),
        torch=by_pytorch(cap, window),
        shapes=SHAPES,
        inputs=lambda random, shape: tuple(random(shape) for _ in range(3)),
        forward=products(2, window),
        backward=products(5, window),
        libraries={"flex_attention": by_flex(cap, window)},
        variant=", ".join(["soft cap"] * cap + ["window"] * window),
        dtype="float16",
    )


WORKLOADS = [work(cap=False, window=True), work(cap=True, window=False), work(cap=True, window=True)]
