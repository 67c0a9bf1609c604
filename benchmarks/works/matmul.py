"""The works of matmul/matmul beside other libraries."""

from operator import attrgetter

from work import Product, Work

WORKS = [
    Work(
        "matmul/matmul",
        ours=attrgetter("matmul"),
        torch=lambda torch: torch.matmul,
        shapes=[
            (8192, 8192, 8192),
            (4096, 4096, 4096),
            (8192, 8192, 2048),
            (8191, 8193, 4097),
            *((4096, N, K) for K, N in ((4096, 14336), (7168, 2048), (2880, 5120))),
        ],
        inputs=lambda random, shape: (random((shape[0], shape[2])), random((shape[1], shape[2])).T),
        forward=lambda shape, _: Product(*shape),
        backward=lambda shape, _: Product(shape[0], shape[1], 2 * shape[2]),
    ),
]
