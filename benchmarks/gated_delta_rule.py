"""Workloads of attention/gated_delta_rule beside other libraries."""

from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload


def moved(read: int, written: int) -> Function:
    """Return the work of reading and writing so many tensors of the size of q; gates and betas are left out."""

    def amount(shape: tuple[int, ...], itemsize: int) -> Bytes:
        batch, length, heads, head = shape
        size = batch * length * heads * head * itemsize
        return Bytes(read * size, written * size)

    return amount


def inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return queries, keys of length 1, values, and log decays and betas, which are in float32."""
    q, k, v = (random(shape) for _ in range(3))
    k = (k.detach() / k.detach().norm(dim=-1, keepdim=True)).requires_grad_()
    gates, betas = (random(shape[:3]).detach().float() for _ in range(2))
    decays = -(gates - 3).exp().log1p()  # the logarithm of a sigmoid
    return q, k, v, decays.requires_grad_(), betas.sigmoid().requires_grad_()


def in_chunks(torch: Any) -> Function:
    """Return the same through PyTorch's operators: a system for each chunk, and a loop over the chunks.

    It is not compiled: that takes minutes, as the loop becomes a graph of thousands of operators.
    """

    def attention(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        size, scale = min(64, q.shape[1]), q.shape[-1] ** -0.5
        q, k, v, g, beta = (t.unflatten(1, (-1, size)).movedim(3, 1) for t in (q, k, v, g, beta))
        decay = g.cumsum(-1)
        total = decay[..., -1:]
        since = decay[..., :, None] - decay[..., None, :]
        seen = torch.ones_like(since, dtype=torch.bool).tril()
        weights = since.masked_fill(~seen, -torch.inf).exp()
        system = (k @ k.mT * weights).tril(-1) * beta[..., None, :]
        wanted = torch.cat([k * decay.exp()[..., None], v], dim=-1).to(g.dtype)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).to(v.dtype)
        w, y = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
        left = (k * ((total - decay).exp() * beta)[..., None]).to(v.dtype)
        p = (q @ k.mT * weights * beta[..., None, :]).to(v.dtype)
        reads = (q * decay.exp()[..., None]).to(v.dtype)
        state, outs = g.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for chunk in range(q.shape[2]):
            before = state.to(v.dtype)
            x = y[:, :, chunk] - w[:, :, chunk] @ before
            outs.append(reads[:, :, chunk] @ before + p[:, :, chunk] @ x)
            state = state * total[:, :, chunk, :, None].exp() + left[:, :, chunk].mT @ x
        out = torch.stack(outs, dim=2) * scale
        return out.movedim(1, 3).flatten(1, 2)

    return attention


def of_library(module: ModuleType) -> Function:
    """Return the outputs of flash-linear-attention's op."""
    return lambda q, k, v, g, beta: module.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


WORKLOADS = [
    Workload(
        "attention/gated_delta_rule",
        ours=lambda recipe: lambda *tokens: recipe.gated_delta_rule(*tokens)[0],
        torch=in_chunks,
        shapes=[(1, 8192, 16, 128), (1, 8192, 32, 128), (8, 2048, 16, 128), (1, 65536, 16, 128)],
        inputs=inputs,
        forward=moved(3, 1),
        backward=moved(4, 3),
        compiles=False,
        libraries={"FLA's gated delta rule": of_library},
    )
]
