"""Workloads of fusion/topk_long beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, floats, tensors

WORKLOADS = [
    Workload(
        "fusion/topk_long",
        variant=f"{dtype}, k = {k}",
        ours=attrgetter("topk_long"),
        torch=attrgetter("topk"),
        shapes=shapes,
        inputs=lambda random, shape: (random(shape),),
        constants=(k,),
        forward=tensors(1, 0),
        backward=None,
        dtype=dtype,
        alike=floats,
    )
    for dtype, k, shapes in (
        ("float32", 8, [(4096, 32000), (1024, 50257)]),
        ("float32", 64, [(1, 151936), (64, 128256), (4096, 32000), (1024, 201088)]),
        ("bfloat16", 8, [(1024, 128256)]),
    )
]
