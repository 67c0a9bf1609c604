"""Workloads of attention/flash_attention_forward beside other libraries."""

from typing import Any

from triton_gallery.libraries.workload import Function, Product, Workload

SHAPES = [(16384 // length, 2048 // head, length, head) for head in (64, 128) for length in (1024, 4096, 16384)]
LIBRARIES = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}


def of_library(backend: str, is_causal: bool, grouped: bool = False) -> Function:
    """Return what gives PyTorch's attention by one library, given `torch.nn`."""

    def of(nn: Any) -> Function:
        def attention(q: Any, k: Any, v: Any) -> Any:
            with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

        return attention

    return of


def work(is_causal: bool) -> Workload:
    """Return the work of attention, with a causal mask or without one."""

    def products(shape: tuple[int, ...], _: int) -> Product:
        """Return a product of as many operations: two for each pair of query and key, of which a mask leaves half."""
        batch, heads, length, head = shape
        side = 8192
        return Product(side, side, max(1, 2 * batch * heads * length**2 * head // side**2 // (1 + is_causal)))

    return Workload(
        "attention/flash_attention_forward",
        ours=lambda recipe: lambda q, k, v: recipe.flash_attention_forward(q, k, v, causal=is_causal),
        torch=lambda torch: (
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        ),
        shapes=SHAPES,
        inputs=lambda random, shape: tuple(random(shape) for _ in range(3)),
        forward=products,
        backward=None,
        libraries={name: of_library(backend, is_causal) for name, backend in LIBRARIES.items()},
        variant="causal" if is_causal else "",
        dtype="float16",
    )


WORKLOADS = [work(False), work(True)]
