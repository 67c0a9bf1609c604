"""The works of fusion/topk beside other libraries."""

from operator import attrgetter

from work import Work, tensors

WORKS = [
    Work(
        "fusion/topk",
        variant="float32, k = 8",
        ours=attrgetter("topk"),
        torch=attrgetter("topk"),
        shapes=[(16384, 128), (16384, 4096), (4096, 32000)],
        inputs=lambda random, shape: (random(shape),),
        constants=(8,),
        forward=tensors(1, 0),
        backward=None,
        dtype="float32",
    ),
    Work(
        "fusion/topk",
        variant="float32, k = 64",
        ours=attrgetter("topk"),
        torch=attrgetter("topk"),
        shapes=[(1, 151936), (64, 128256), (4096, 32000)],
        inputs=lambda random, shape: (random(shape),),
        constants=(64,),
        forward=tensors(1, 0),
        backward=None,
        dtype="float32",
    ),
]
