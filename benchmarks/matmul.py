"""Workloads of matmul/matmul beside other libraries: at sizes of models, and at sizes that no model has.

As a program, `python -m benchmarks.matmul` times plans of drawn products on this GPU, and fits to them what the op
counts when it chooses one.
"""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from triton_gallery.libraries.workload import Function, Product, Workload, drawn_size

if TYPE_CHECKING:
    import torch

LARGEST = 16384
SEEDS = (0, 1, 2)
LAYOUTS = ("nn", "nt", "tn", "tt")  # a and b: "n" has contiguous rows, "t" contiguous columns


def drawn(seed: int) -> list[tuple[int, int, int]]:
    """Return sizes M, K and N, drawn alike over their logarithm.

    One each has fewer than 64 rows; multiples of 8 that are none of 16; an odd N; and any sizes.
    """
    random = Random(seed)  # noqa: S311 - no secret
    size = partial(drawn_size, random, most=LARGEST)

    def eight() -> int:
        return size(64, most=LARGEST - 16) // 16 * 16 + 8

    return [
        (size(1, most=63), size(64), size(64)),
        (eight(), eight(), eight()),
        (size(64), size(64), size(64, most=LARGEST - 1) // 2 * 2 + 1),
        (size(1), size(1), size(1)),
    ]


def inputs(random: Function, shape: tuple[int, ...], layout: str = "nt") -> tuple[Any, ...]:
    """Return a and b of a layout."""
    M, K, N = shape
    a = random((K, M)).T if layout[0] == "t" else random((M, K))
    b = random((N, K)).T if layout[1] == "t" else random((K, N))
    return a, b


def products(shapes: list[tuple[int, int, int]], layout: str, variant: str = "", dtype: str = "bfloat16") -> Workload:
    """Return the workload of some sizes and one layout."""
    return Workload(
        "matmul/matmul",
        variant=variant,
        dtype=dtype,
        ours=attrgetter("matmul"),
        torch=lambda torch: torch.matmul,
        shapes=shapes,
        inputs=partial(inputs, layout=layout),
        forward=lambda shape, _: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=lambda shape, _: Product(M=shape[0], N=shape[2], K=2 * shape[1]),
    )


WORKLOADS = [
    products(
        [  # M, K and N
            (8192, 8192, 8192),
            (4096, 4096, 4096),
            (8192, 2048, 8192),
            (8191, 4097, 8193),
            (4096, 4096, 14336),
            (4096, 7168, 2048),
            (4096, 2880, 5120),
            (5000, 5000, 5000),
            (500, 3072, 9216),
            (40, 3072, 9216),
            (500, 1792, 5376),
            (40, 6144, 2048),
            (3000, 7000, 9000),
        ],
        layout="nt",
    ),
    products([(3000, 7000, 9000)], "tn", "a transposed"),
    products([(3000, 7000, 9000)], "tt", "both transposed"),
    products([(3000, 7000, 9000)], "nt", "float32", dtype="float32"),  # IEEE, PyTorch's default
    *(
        products(
            drawn(len(LAYOUTS) * seed + place), layout, f"drawn {seed}, {layout}", ("bfloat16", "float16")[seed % 2]
        )
        for seed in SEEDS
        for place, layout in enumerate(LAYOUTS)
    ),
]

FITTED = range(100, 148)  # of other products than SEEDS draws
CLOSEST = 2  # ways to split the sums of each tile that are timed
TURNS, WARM_UP = 11, 2
FINEST = 1.02  # change of a number
NAMES = ("MATMUL_LOAD", "MATMUL_STEP", "MATMUL_STORE", "MATMUL_MEMORY", "MATMUL_ADD", "MATMUL_PART")


@dataclass(frozen=True)
class TimedPlan:
    """A plan of a product: what `_matmul_time` is told of it, and the microseconds that it took.

    Attributes:
        product: its number.
        told: the arguments.
        copies: how many operands the engine has copied, and their elements.
        us: the time.
    """

    product: int
    told: tuple[Any, ...]
    copies: tuple[int, int]
    us: float


def drawn_products(device: Any) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Yield operands: those of a product, or of one of its two gradients."""
    import torch

    random = partial(torch.randn, dtype=torch.bfloat16, device=device)
    for seed in FITTED:
        shape = drawn(seed)[seed // 12 % 4]
        a, b = inputs(random, shape, LAYOUTS[seed % 4])
        grad = random((shape[0], shape[2]))
        yield ((a, b), (grad, b.T), (a.T, grad))[seed // 4 % 3]


def timed(op: ModuleType, product: int, a: "torch.Tensor", b: "torch.Tensor") -> list[TimedPlan]:
    """Time a product by each tile of each way, with the sums split as the op finds best at present."""
    from triton_gallery.bench import time_turns

    (M, K), N = a.shape, b.shape[1]
    processors, shared = op._persistent_matmul_gpu(a.device)
    vecs = max(op._matmul_vec(a)), max(op._matmul_vec(b))
    tiles = op.MATMUL_NARROW if min(vecs) == 1 else op.MATMUL_TILES[2]
    blocks = [(op._matmul_block(M, m), op._matmul_block(N, n), *more) for m, n, *more in tiles]
    copied = [x.numel() for x in (a, b) if op._persistent_matmul_turned(x, x.data_ptr()) is None]
    stages = {tile: op._persistent_matmul_stages(tile, 2, shared) for tile in op.PERSISTENT_MATMUL_TILES}
    engine = [tile for tile, count in stages.items() if count >= op.PERSISTENT_MATMUL_STAGES]
    out = a.new_empty(M, N)
    told, calls = {}, {}
    for way, tile in [("pointers", tile) for tile in dict.fromkeys(blocks)] + [("engine", tile) for tile in engine]:
        found = []
        for parts in op.MATMUL_PARTS:
            given = M, N, K, tile, parts, way, vecs, processors
            if time := op._matmul_time(*given):
                found.append((*time, given))
        for _, divided, given in sorted(found)[:CLOSEST]:
            run = op._persistent_matmul_run if way == "engine" else op._matmul_by_pointers
            plan = tile, stages.get(tile, tile[-1]), *divided
            told[plan] = given
            calls[plan] = partial(run, a, b, out, "ieee", plan)
    times = time_turns(calls, TURNS, warm_up=WARM_UP)  # type: ignore[no-untyped-call]
    plans = []
    for plan, turns in times.items():
        copies = (len(copied), sum(copied)) if told[plan][5] == "engine" else (0, 0)
        plans.append(TimedPlan(product, told[plan], copies, 1e3 * statistics.median(ms for ms, *_ in turns)))
    return plans


def counted(op: ModuleType, plan: TimedPlan) -> float:
    """Return the time that the op counts for a plan."""
    begin, rate = op.MATMUL_COPY
    count, elements = plan.copies
    time: float = op._matmul_time(*plan.told)[0] + count * begin + 4 * elements / rate
    return time


def numbers(op: ModuleType) -> list[float]:
    """Return what the op counts with."""
    costs = op.MATMUL_COSTS
    return [*costs["engine"], *costs["pointers"], *op.MATMUL_COPY, *(getattr(op, name) for name in NAMES)]


def count_with(op: ModuleType, found: list[float]) -> None:
    """Have the op count with other numbers."""
    op.MATMUL_COSTS = {"engine": tuple(found[:6]), "pointers": tuple(found[6:12])}  # type: ignore[attr-defined]
    op.MATMUL_COPY = tuple(found[12:14])  # type: ignore[attr-defined]
    for name, number in zip(NAMES, found[14:], strict=True):
        setattr(op, name, number)


def distance(op: ModuleType, plans: list[TimedPlan]) -> float:
    """Return how far counted times are from those that plans took: the mean difference of their logarithms.

    A plan counts less the longer it takes than the best of its product.
    """
    best: dict[int, float] = {}
    for plan in plans:
        best[plan.product] = min(plan.us, best.get(plan.product, plan.us))
    weights = [1 / (1 + 3 * math.log(plan.us / best[plan.product])) for plan in plans]
    errors = [abs(math.log(counted(op, plan) / plan.us)) for plan in plans]
    return sum(weight * error for weight, error in zip(weights, errors, strict=True)) / sum(weights)


def fit(op: ModuleType, plans: list[TimedPlan]) -> float:
    """Change what the op counts with, one number after another, as long as that lessens the distance; return it."""

    def away(found: list[float]) -> float:
        count_with(op, found)
        return distance(op, plans)

    found, step = numbers(op), 1.5
    least = away(found)
    while step > FINEST:
        before = least
        for place, number in enumerate(found):
            for tried in (number * step, number / step):
                other = [*found[:place], tried, *found[place + 1 :]]
                if number and (error := away(other)) < least:
                    found, least = other, error
        if least > 0.999 * before:
            step = math.sqrt(step)
    return away([float(f"{number:.2g}") for number in found])


def lost(op: ModuleType, plans: list[TimedPlan]) -> list[float]:
    """Return, for each product, how many times as long as its best plan that takes which the op would choose."""
    of_products: dict[int, list[TimedPlan]] = {}
    for plan in plans:
        of_products.setdefault(plan.product, []).append(plan)
    chosen = {product: min(some, key=partial(counted, op)) for product, some in of_products.items()}
    return sorted(chosen[product].us / min(plan.us for plan in some) for product, some in of_products.items())


def main() -> None:
    """Time plans, fit to them, and print what was found."""
    import torch

    import triton_gallery_ops.matmul as op

    plans: list[TimedPlan] = []
    for product, (a, b) in enumerate(drawn_products(torch.device("cuda", torch.cuda.current_device()))):
        plans += timed(op, product, a, b)
        print(f"{tuple(a.shape)} x {tuple(b.shape)}: {len(plans)} plans in all", flush=True)
    for state in ("before", "fitted"):
        apart = fit(op, plans) if state == "fitted" else distance(op, plans)
        times = lost(op, plans)
        print(
            f"{state}: counted and measured times differ by {apart:.1%}; the chosen plan takes "
            f"{statistics.median(times):.2f} times as long as the best, at the most {times[-1]:.2f}"
        )
    print(
        op.MATMUL_COSTS,
        f"MATMUL_COPY = {op.MATMUL_COPY}",
        *(f"{name} = {getattr(op, name)}" for name in NAMES),
        sep="\n",
    )


if __name__ == "__main__":
    main()
