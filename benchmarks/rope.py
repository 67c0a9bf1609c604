"""Workloads of fusion/rope beside other libraries."""

from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import COPY, Function, Workload


def rope_torch(torch: Any) -> Function:
    """Return RoPE of queries and keys, in halves."""

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return lambda q, k, cos, sin: (turned(q, cos, sin), turned(k, cos, sin))


def rope_inside(torch: Any) -> Function:
    """Return RoPE of queries and keys whose heads lie inside, and those of the results too."""
    turn = rope_torch(torch)

    def function(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos[:, None], sin[:, None])
        return q.transpose(1, 2), k.transpose(1, 2)

    return function


def rope_inputs(random: Function, shape: tuple[int, ...], axis: int = 1, grad: bool = True) -> tuple[Any, ...]:
    """Return queries, keys and tables; the heads lie along `axis` of the shape, and four of five are of queries."""
    heads = random(shape).detach().tensor_split([shape[axis] - shape[axis] // 5], axis)
    q, k = (part.contiguous().transpose(1, axis).requires_grad_(grad) for part in heads)
    angle = random((q.shape[2], q.shape[3] // 2)).detach()
    return q, k, angle.cos(), angle.sin()


def rope_in_place(module: ModuleType) -> Function:
    """Return our op in place, so that it returns what it wrote."""

    def function(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        module.rope_(q, k, cos, sin)
        return q, k

    return function


def liger_rope(module: ModuleType) -> Function:
    """Return Liger's RoPE, which takes tables of half the columns only if it is told how many are turned."""
    return lambda q, k, cos, sin: module.liger_rope(q, k, cos, sin, rotary_dim=q.shape[-1])


# Of Liger-Kernel's benchmark/scripts/benchmark_rope.py: Llama 3 8B at the fewest and the most tokens; and, of its older
# version, 2048 tokens of the least heads, and the most tokens of the largest. Four of five heads are of queries.
LIGER = [(1, 1024, 40, 128), (1, 8192, 40, 128), (1, 2048, 40, 16), (1, 16384, 40, 256)]
WORKLOADS = [
    Workload(
        "fusion/rope",
        ours=attrgetter("rope"),
        torch=rope_torch,
        shapes=[(64, 40, 1, 128), (4, 40, 2048, 64), (1, 40, 32768, 128), (8, 40, 4096, 128)],
        inputs=rope_inputs,
        backward=COPY,
        libraries={"Liger": liger_rope},
    ),
    Workload(
        "fusion/rope",
        variant="in place",
        ours=rope_in_place,
        torch=rope_torch,
        shapes=[(64, 40, 1, 128), (4, 40, 2048, 64), (8, 40, 4096, 128)],
        inputs=partial(rope_inputs, grad=False),
        backward=None,
        libraries={"Liger": liger_rope},
    ),
    Workload(
        "fusion/rope",
        variant="in place, heads inside",
        ours=rope_in_place,
        torch=rope_torch,
        shapes=[(64, 1, 40, 128), (4, 2048, 40, 64), (8, 4096, 40, 128)],
        inputs=partial(rope_inputs, axis=2, grad=False),
        backward=None,
        libraries={"Liger": liger_rope},
    ),
    Workload(
        "fusion/rope",
        variant="heads inside, Liger's sizes",
        ours=attrgetter("rope"),
        torch=rope_inside,
        shapes=LIGER,
        inputs=partial(rope_inputs, axis=2),
        backward=COPY,
        libraries={"Liger": liger_rope},
    ),
    Workload(
        "fusion/rope",
        variant="in place, heads inside, Liger's sizes",
        ours=rope_in_place,
        torch=rope_inside,
        shapes=LIGER,
        inputs=partial(rope_inputs, axis=2, grad=False),
        backward=None,
        libraries={"Liger": liger_rope},
    ),
]
