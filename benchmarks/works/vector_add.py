"""The works of first_steps/vector_add beside other libraries."""

from operator import attrgetter

from work import ADD, Work

WORKS = [
    Work(
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
    Work(
        "first_steps/vector_add",
        variant="bfloat16",
        ours=attrgetter("add"),
        torch=attrgetter("add"),
        shapes=[(10_000_000,), (10_000_001,)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=None,
    ),
]
