"""Workloads of first_steps/vector_add beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import ADD, Workload

WORKLOADS = [
    Workload(
        "first_steps/vector_add",
        variant="float32",
        ours=attrgetter("add"),
        torch=attrgetter("add"),
        shapes=[(2**20,), (2**24,), (2**27,)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=None,
        dtype="float32",
    ),
]
