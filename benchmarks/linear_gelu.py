"""Workloads of matmul/linear_gelu beside PyTorch's."""

from operator import attrgetter

from triton_gallery.libraries.workload import Product, Workload

WORKLOADS = [
    Workload(
        "matmul/linear_gelu",
        ours=attrgetter("linear_gelu"),
        torch=lambda torch: (
            lambda x, weight, bias: torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
        ),
        shapes=[  # tokens, K and N of layers of models
            *((8192, size, 4 * size) for size in (1600, 2880, 4096)),
            (8192, 4096, 14336),
            (8192, 8192, 8192),
            (1024, 4096, 16384),
            (8191, 4097, 8193),
            (500, 1792, 5376),
        ],
        inputs=lambda random, shape: (
            random(shape[:2]),
            # Else z would grow with K, and nearly all of GELU would be 0 or z.
            (random(shape[:0:-1]) * shape[1] ** -0.5).detach().requires_grad_(),
            random(shape[2:]),
        ),
        forward=lambda shape, itemsize: Product(shape[0], shape[2], shape[1]),
        backward=lambda shape, itemsize: Product(shape[0], shape[2], 2 * shape[1]),
    ),
]
