"""The works of attention/flash_attention_forward beside other libraries."""

from operator import attrgetter
from typing import Any

from work import Function, Product, Work


def causal(function: Function) -> Function:
    """Return attention with a causal mask."""
    return lambda q, k, v: function(q, k, v, is_causal=True)


def by(backend: str, is_causal: bool) -> Function:
    """Return what gives PyTorch's attention by one library, given `torch.nn`."""

    def of(nn: Any) -> Function:
        def attention(q: Any, k: Any, v: Any) -> Any:
            with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        return attention

    return of


def products(shape: tuple[int, ...], share: int) -> Product:
    """Return a product of as many operations: two for each pair of query and key, of which a share is seen."""
    batch, heads, length, head = shape
    side = 8192
    return Product(side, side, max(1, 2 * batch * heads * length**2 * head // side**2 // share))


SHAPES = [(16384 // length, 2048 // head, length, head) for head in (64, 128) for length in (1024, 4096, 16384)]

WORKS = [
    Work(
        "attention/flash_attention_forward",
        ours=attrgetter("flash_attention_forward"),
        torch=lambda torch: lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        shapes=SHAPES,
        inputs=lambda random, shape: tuple(random(shape) for _ in range(3)),
        forward=lambda shape, _: products(shape, 1),
        backward=None,
        peers={"cuDNN": by("CUDNN_ATTENTION", False), "FlashAttention-2": by("FLASH_ATTENTION", False)},
        dtype="float16",
    ),
    Work(
        "attention/flash_attention_forward",
        ours=lambda recipe: lambda q, k, v: recipe.flash_attention_forward(q, k, v, causal=True),
        torch=lambda torch: causal(torch.nn.functional.scaled_dot_product_attention),
        shapes=SHAPES,
        inputs=lambda random, shape: tuple(random(shape) for _ in range(3)),
        forward=lambda shape, _: products(shape, 2),
        backward=None,
        peers={"cuDNN": by("CUDNN_ATTENTION", True), "FlashAttention-2": by("FLASH_ATTENTION", True)},
        variant="causal",
        dtype="float16",
    ),
]
