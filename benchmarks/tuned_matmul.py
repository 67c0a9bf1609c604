"""Workloads of matmul/tuned_matmul beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Product, Workload, layers

WORKLOADS = [
    Workload(
        "matmul/tuned_matmul",
        variant=name,
        ours=attrgetter("tuned_matmul"),
        torch=lambda torch: lambda a, b: a @ b,
        shapes=shapes,
        inputs=inputs,
        forward=lambda shape, itemsize: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=None,
        dtype=dtype,
    )
    for name, dtype, shapes, inputs in [
        (
            "weights (N, K)",
            "bfloat16",
            layers(1, 16, 128, 1024, 4096, 16384),
            lambda random, shape: (random(shape[:2]), random(shape[:0:-1]).T),
        ),
        (
            "weights (K, N)",
            "float16",
            [(4096, 4096, 14336), (8192, 8192, 8192), (8191, 4097, 8193)],
            lambda random, shape: (random(shape[:2]), random(shape[1:])),
        ),
        (
            "float32",
            "float32",
            [(4096, 4096, 4096)],
            lambda random, shape: (random(shape[:2]), random(shape[1:])),
        ),
    ]
]
