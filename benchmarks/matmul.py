"""Workloads of matmul/matmul beside other libraries: at sizes of models, and at sizes that no model has."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

from functools import partial
from operator import attrgetter
from random import Random
from typing import Any

from triton_gallery.libraries.workload import Function, Product, Workload, drawn_size

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
