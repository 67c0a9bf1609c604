"""Workloads of matmul/skinny_matmul beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Product, Workload, layers

WORKLOADS = [
    Workload(
        "matmul/skinny_matmul",
        ours=attrgetter("skinny_matmul"),
        torch=lambda torch: torch.nn.functional.linear,
        shapes=[*layers(1, 16, 64), (1, 8192, 8192), (16, 8192, 8192)],  # rows, K, N
        inputs=lambda random, shape: (random(shape[:2]), random((shape[2], shape[1]))),
        forward=lambda shape, itemsize: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=None,
    ),
]
