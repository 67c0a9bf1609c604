"""Workloads of matmul/matmul beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Product, Workload

WORKLOADS = [
    Workload(
        "matmul/matmul",
        ours=attrgetter("matmul"),
        torch=lambda torch: torch.matmul,
        shapes=[  # M, K and N
            (8192, 8192, 8192),
            (4096, 4096, 4096),
            (8192, 2048, 8192),
            (8191, 4097, 8193),
            (4096, 4096, 14336),
            (4096, 7168, 2048),
            (4096, 2880, 5120),
        ],
        inputs=lambda random, shape: (random(shape[:2]), random((shape[2], shape[1])).T),
        forward=lambda shape, _: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=lambda shape, _: Product(M=shape[0], N=shape[2], K=2 * shape[1]),
    ),
]
