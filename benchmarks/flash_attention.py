"""Workloads of attention/flash_attention beside other libraries: at sizes of models, and at sizes that no model has."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from benchmarks.flash_attention_forward import LIBRARIES, SHAPES, of_library
from triton_gallery.libraries.workload import Function, Product, Workload, drawn_size

SEEDS = (0, 1, 2)
HEADS = (64, 96, 128)  # their sizes


def drawn(seed: int, is_causal: bool) -> list[tuple[int, ...]]:
    """Return batch, heads, heads of keys, a length and a head's size: one for each such size, of either mask."""
    random = Random(seed)  # noqa: S311 - no secret
    shapes: list[tuple[int, ...]] = []
    for place, head in enumerate(HEADS):
        shared, group = random.choice((2, 4, 8)), random.choice((1, 2, 4))
        length = drawn_size(random, 64, 16384)
        if (seed + place) % 2 == is_causal:
            shapes.append((max(1, 16384 // length), shared * group, shared, length, head))
    return shapes


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return queries, keys and values; a shape of four has as many heads of keys."""
    batch, heads, *groups, length, head = shape
    shared = groups[0] if groups else heads
    return random((batch, heads, length, head)), *(random((batch, shared, length, head)) for _ in range(2))


def products(shape: tuple[int, ...], _: int, number: int, is_causal: bool) -> Product:
    """Return a product of as many operations: so many for each pair of query and key, of which a mask leaves half."""
    batch, heads = shape[:2]
    length, head = shape[-2:]
    count = number * batch * heads * length**2 * head // (1 + is_causal)
    side = 8192 if count > 64 * 8192**2 else 2048  # K is rounded
    return Product(side, side, max(1, count // side**2))


def work(
    is_causal: bool, shapes: Sequence[tuple[int, ...]] = SHAPES, variant: str = "", dtype: str = "float16"
) -> Workload:
    """Return the work of attention, with a causal mask or without one."""
    grouped = any(len(shape) > 4 for shape in shapes)
    return Workload(
        "attention/flash_attention",
        ours=lambda recipe: lambda q, k, v: recipe.flash_attention(q, k, v, causal=is_causal),
        torch=lambda torch: (
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=grouped
            )
        ),
        shapes=shapes,
        inputs=inputs,
        forward=partial(products, number=2, is_causal=is_causal),
        backward=partial(products, number=5, is_causal=is_causal),
        libraries={name: of_library(backend, is_causal, grouped) for name, backend in LIBRARIES.items()},
        variant=", ".join(filter(None, (variant, "causal" if is_causal else ""))),
        dtype=dtype,
    )


# The shortest heads of 64, and the longest of 128
FIXED = [SHAPES[0], SHAPES[-1]]
WORKLOADS = [
    *(work(is_causal, FIXED) for is_causal in (False, True)),
    *(
        work(is_causal, drawn(seed, is_causal), f"drawn {seed}", ("bfloat16", "float16")[seed % 2])
        for seed in SEEDS
        for is_causal in (False, True)
    ),
]
