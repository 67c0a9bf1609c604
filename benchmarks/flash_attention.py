"""Workloads of attention/flash_attention beside other libraries."""

from functools import partial

from benchmarks.flash_attention_forward import LIBRARIES, SHAPES, of_library
from triton_gallery.libraries.workload import Product, Workload


def products(shape: tuple[int, ...], _: int, number: int, is_causal: bool) -> Product:
    """Return a product of as many operations: so many for each pair of query and key, of which a mask leaves half."""
    batch, heads, length, head = shape
    side = 8192
    return Product(side, side, max(1, number * batch * heads * length**2 * head // side**2 // (1 + is_causal)))


def work(is_causal: bool) -> Workload:
    """Return the work of attention, with a causal mask or without one."""
    return Workload(
        "attention/flash_attention",
        ours=lambda recipe: lambda q, k, v: recipe.flash_attention(q, k, v, causal=is_causal),
        torch=lambda torch: (
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        ),
        shapes=SHAPES,
        inputs=lambda random, shape: tuple(random(shape) for _ in range(3)),
        forward=partial(products, number=2, is_causal=is_causal),
        backward=partial(products, number=5, is_causal=is_causal),
        libraries={name: of_library(backend, is_causal) for name, backend in LIBRARIES.items()},
        variant="causal" if is_causal else "",
        dtype="float16",
    )


WORKLOADS = [work(False), work(True)]
