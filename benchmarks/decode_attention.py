"""Workloads of attention/decode_attention beside other libraries, which read the same keys without pages."""

from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload, drawn_rows

HEADS, SHARED, D, PAGE = 32, 8, 128, 16  # heads of queries and of keys
SHAPES = [(1, 8192), (1, 131072), (16, 8192), (32, 8192), (128, 1024)]  # sequences, keys of each
SHAPES += [drawn_rows(seed, (1, 128), (512, 131072), 2**19, PAGE) for seed in (0, 1, 2)]
LIBRARIES = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return queries, a cache in shuffled pages with its table and lengths, and the same keys and values in order."""
    import torch

    batch, length = shape
    pages = batch * length // PAGE
    q = random((batch, 1, HEADS, D)).detach()
    k_cache, v_cache = (random((pages, PAGE, SHARED, D)).detach() for _ in range(2))
    table = torch.randperm(pages, device=q.device, dtype=torch.int32).view(batch, -1)
    k, v = (cache[table].flatten(1, 2).transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
    lens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    return q, k_cache, v_cache, table, lens, k, v


def of_torch(torch: Any) -> Function:
    """Return PyTorch's attention of what `inputs` returns, without pages."""

    def attention(q: Any, k_cache: Any, v_cache: Any, table: Any, lens: Any, k: Any, v: Any) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)

    return attention


def of_library(backend: str) -> Function:
    """Return what gives that attention by one library, given `torch.nn`."""

    def of(nn: Any) -> Function:
        import torch

        def attention(*of: Any) -> Any:
            with nn.attention.sdpa_kernel(getattr(nn.attention.SDPBackend, backend)):
                return of_torch(torch)(*of)

        return attention

    return of


def keys_and_values(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return the work of reading them once."""
    return Bytes(2 * shape[0] * shape[1] * SHARED * D * itemsize, 0)


WORKLOADS = [
    Workload(
        "attention/decode_attention",
        ours=lambda recipe: lambda *of: recipe.decode_attention(*of[:5]),
        torch=of_torch,
        shapes=SHAPES,
        inputs=inputs,
        forward=keys_and_values,
        backward=None,
        libraries={name: of_library(backend) for name, backend in LIBRARIES.items()},
        dtype="float16",
    )
]
