"""Workloads of attention/kv_cache_write beside other libraries."""

import math
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload

PAGE, GROUP, POSITIONS = 16, 4, 4096  # tokens of a page, heads of queries for one of keys, rows of the tables


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return queries, keys and values, a cache in pages, slots anywhere in it, positions, and tables."""
    import torch

    tokens, heads, size = shape
    q = random(shape).detach()
    k, v = (random((tokens, heads // GROUP, size)).detach() for _ in range(2))
    pages = tokens // PAGE + 1
    caches = (random((pages, PAGE, heads // GROUP, size)).detach() for _ in range(2))
    slots = torch.randperm(pages * PAGE, device=q.device)[:tokens]
    positions = torch.randint(0, POSITIONS, (tokens,), device=q.device)
    angles = random((POSITIONS, size // 2), dtype=torch.float32).detach()
    return q, k, v, *caches, slots, positions, angles.cos(), angles.sin()


def ours(module: ModuleType) -> Function:
    """Return our op, so that it returns the caches too."""
    return lambda q, k, v, *others: (*module.kv_cache_write_(q, k, v, *others), *others[:2])


def of_torch(torch: Any) -> Function:
    """Return the same, in halves."""

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def write(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, positions: Any, *tables: Any) -> Any:
        cos, sin = (table[positions][:, None] for table in tables)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k_cache.view(-1, *k.shape[1:])[slots] = k
        v_cache.view(-1, *v.shape[1:])[slots] = v
        return q, k, k_cache, v_cache

    return write


def moved(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return the work of reading all three, and writing queries, keys, and both into the caches."""
    size = math.prod(shape) * itemsize
    return Bytes(size + 2 * size / GROUP, size + 3 * size / GROUP)


WORKLOADS = [
    Workload(
        "attention/kv_cache_write",
        ours=ours,
        torch=of_torch,
        shapes=[(32, 32, 128), (1024, 32, 128), (8192, 32, 128)],
        inputs=inputs,
        forward=moved,
        backward=None,
        dtype="float16",
    )
]
