"""Workloads of attention/linear_attention beside other libraries."""

from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload


def moved(read: int, written: int) -> Function:
    """Return the work of reading and writing so many tensors of the size of q; gates are left out."""

    def amount(shape: tuple[int, ...], itemsize: int) -> Bytes:
        batch, length, heads, head = shape
        size = batch * length * heads * head * itemsize
        return Bytes(read * size, written * size)

    return amount


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return queries, keys, values, and log decays, which are in float32 whatever the others are."""
    gates = random(shape[:3]).detach()
    decays = -(gates.float() - 3).exp().log1p()  # the logarithm of a sigmoid
    return *(random(shape) for _ in range(3)), decays.requires_grad_()


def in_chunks(torch: Any) -> Function:
    """Return the same through PyTorch's operators: chunks, with a matrix of the decays between them."""

    def weights(late: Any, early: Any, diagonal: int) -> Any:
        exponents = late[..., :, None] - early[..., None, :]
        seen = torch.ones_like(exponents, dtype=torch.bool).tril(diagonal)
        return exponents.masked_fill(~seen, -torch.inf).exp()

    def attention(q: Any, k: Any, v: Any, g: Any) -> Any:
        size = min(64, q.shape[1])
        q, k, v, g = (t.unflatten(1, (-1, size)).movedim(3, 1) for t in (q, k, v, g))
        decay = g.cumsum(-1)
        total = decay[..., -1]
        inside = (q @ k.mT * weights(decay, decay, 0)).to(v.dtype) @ v
        left = (total[..., None] - decay).exp()[..., None]
        added = (k.mT @ (v * left).to(v.dtype)).flatten(3).to(g.dtype)
        since = total.cumsum(-1)
        states = (weights(since - total, since, -1) @ added).unflatten(3, (k.shape[-1], -1)).to(q.dtype)
        out = (inside + (q @ states) * decay.exp()[..., None]) * q.shape[-1] ** -0.5
        return out.to(v.dtype).movedim(1, 3).flatten(1, 2)

    return attention


def of_library(module: ModuleType) -> Function:
    """Return the outputs of flash-linear-attention's op."""
    return lambda q, k, v, g: module.chunk_simple_gla(q, k, v, g=g, output_final_state=True)[0]


WORKLOADS = [
    Workload(
        "attention/linear_attention",
        ours=lambda recipe: lambda q, k, v, g: recipe.linear_attention(q, k, v, g)[0],
        torch=in_chunks,
        shapes=[(1, 8192, 16, 128), (1, 8192, 32, 128), (8, 2048, 16, 128), (1, 65536, 16, 128)],
        inputs=inputs,
        forward=moved(3, 1),
        backward=moved(4, 3),
        libraries={"FLA": of_library},
    )
]
