"""Workloads of fusion/topk beside other libraries."""

from triton_gallery.libraries.workload import Workload, tensors

WORKLOADS = [
    Workload(
        "fusion/topk",
        variant=f"{dtype}, k = {most}",
        ours=lambda op: lambda x, k: op.topk(x, k)[0],  # the values, which have a gradient
        torch=lambda torch: lambda x, k: torch.topk(x, k)[0],
        shapes=shapes,
        inputs=lambda random, shape: (random(shape),),
        constants=(most,),
        forward=tensors(1, 0),
        backward=tensors(0, 1),
        dtype=dtype,
    )
    for dtype, most, shapes in (
        ("float32", 8, [(64, 128), (16384, 128), (16384, 4096), (4096, 8192)]),
        ("float32", 64, [(16384, 256), (16384, 4096)]),
        ("bfloat16", 8, [(16384, 4096)]),
    )
]
