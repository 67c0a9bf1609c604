"""Workloads of several_gpus/expert_all_to_all on one GPU, its only rank: there and back, without links.

The page measures several GPUs. Here is what sorting rows by expert and adding up results costs beside PyTorch's.
"""

# ruff: noqa: N803, N806 - T tokens, H numbers of a row, E experts, as in the recipe

from functools import partial
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Workload


def inputs(random: Function, shape: tuple[int, ...], E: int, k: int) -> tuple[Any, ...]:
    """Return rows, k experts and weights of each, and how the choices are sorted."""
    x = random(shape)
    weights, experts = random((shape[0], E)).detach().float().softmax(-1).topk(k)
    order = experts.flatten().sort(stable=True).indices
    offsets = experts.flatten().bincount(minlength=E).cumsum(0).int()
    return x, experts.int(), weights, order.argsort().int(), offsets


def op(module: ModuleType) -> Function:
    """Return dispatch and combine, of experts that return what they get."""
    made: dict[tuple[Any, ...], Any] = {}

    def there_and_back(x: Any, experts: Any, weights: Any, inverse: Any, offsets: Any) -> Any:
        (T, H), k, E = x.shape, experts.shape[1], len(offsets)
        key = T, H, k, E, x.dtype
        if key not in made:
            made.clear()
            made[key] = module.expert_all_to_all_memory(T, k, H, E, x.dtype, x.dtype)
        rows, _, ends, places = module.expert_all_to_all_dispatch(x, experts, inverse, offsets, made[key])
        return module.expert_all_to_all_combine(rows, weights, places, ends, made[key])

    return there_and_back


def by_torch(torch: Any) -> Function:
    """Return the same by index_select and a sum."""

    def there_and_back(x: Any, experts: Any, weights: Any, inverse: Any, offsets: Any) -> Any:
        k = experts.shape[1]
        rows = x[inverse.argsort() // k]
        y = rows[inverse].view(*weights.shape, -1)
        return (y * weights[:, :, None]).sum(1).to(x.dtype)

    return there_and_back


def moved(shape: tuple[int, ...], itemsize: int, k: int) -> Bytes:
    """Return the bytes: rows in and out k times, copied, and fetched for a sum."""
    T, H = shape
    row = itemsize * T * H
    return Bytes(row * (1 + 2 * k), row * (1 + 2 * k))


WORKLOADS = [
    Workload(
        "several_gpus/expert_all_to_all",
        variant=f"{k} of {E}",
        ours=op,
        torch=by_torch,
        compiles=False,
        shapes=[(T, H) for T in (128, 4096)],
        inputs=partial(inputs, E=E, k=k),
        forward=partial(moved, k=k),
        backward=None,
    )
    for E, k, H in ((128, 8, 2048), (256, 8, 7168))
]
