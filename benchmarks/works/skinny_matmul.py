"""The works of matmul/skinny_matmul beside other libraries."""

from operator import attrgetter

from work import Product, Work

WORKS = [
    Work(
        "matmul/skinny_matmul",
        ours=attrgetter("skinny_matmul"),
        torch=lambda torch: torch.nn.functional.linear,
        # Rows, K, N
        shapes=[
            (1, 4096, 14336),
            (1, 8192, 8192),
            (16, 2880, 5120),
            (16, 8192, 8192),
            (32, 5120, 151936),
            (64, 7168, 2048),
        ],
        inputs=lambda random, shape: (random(shape[:2]), random((shape[2], shape[1]))),
        forward=lambda shape, itemsize: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=None,
    ),
]
