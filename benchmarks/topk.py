"""Workloads of fusion/topk beside other libraries."""

from operator import attrgetter

from triton_gallery.libraries.workload import Workload, floats, tensors

WORKLOADS = [
    Workload(
        "fusion/topk",
        variant=f"{dtype}, k = {k}",
        ours=attrgetter("topk"),
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
        ("float32", 8, [(64, 128), (16384, 64), (16384, 128), (16384, 1000), (16384, 4096), (4096, 8192)]),
        ("float32", 64, [(16384, 256), (16384, 1000), (16384, 4096)]),
        ("bfloat16", 8, [(16384, 128), (16384, 4096)]),
    )
]
