"""Workloads of pytorch/subsystems beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Product, Workload

WORKLOADS = [
    Workload(
        "pytorch/subsystems",
        variant="linear_relu",
        ours=attrgetter("linear_relu"),
        torch=lambda torch: lambda x, weight, bias: torch.relu(torch.nn.functional.linear(x, weight, bias)),
        shapes=[(512, 4096, 4096), (4096, 4096, 4096), (4096, 4096, 14336), (8192, 8192, 8192)],  # M, K and N
        inputs=lambda random, shape: (random(shape[:2]), random((shape[2], shape[1])), random(shape[2:])),
        forward=lambda shape, itemsize: Product(M=shape[0], N=shape[2], K=shape[1]),
        backward=None,
    ),
]
