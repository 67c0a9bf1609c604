"""Workloads of fusion/topk_long beside other libraries."""

from triton_gallery.libraries.workload import Workload, tensors

WORKLOADS = [
    Workload(
        "fusion/topk_long",
        variant=f"{dtype}, k = {most}",
        ours=lambda op: lambda x, k: op.topk_long(x, k)[0],  # the values, which have a gradient
        torch=lambda torch: lambda x, k: torch.topk(x, k)[0],
        shapes=shapes,
        inputs=lambda random, shape: (random(shape),),
        constants=(most,),
        forward=tensors(1, 0),
        backward=tensors(0, 1),
        dtype=dtype,
    )
    for dtype, most, shapes in (
        ("float32", 8, [(4096, 32000)]),
        ("float32", 64, [(1, 151936), (64, 128256), (1024, 201088)]),
        ("bfloat16", 8, [(1024, 128256)]),
    )
]
