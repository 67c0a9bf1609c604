"""The works of fusion/swiglu beside other libraries."""

from operator import attrgetter

from work import ADD, Work, tensors

WORKS = [
    Work(
        "fusion/swiglu",
        ours=attrgetter("swiglu"),
        torch=lambda torch: lambda gate, up: torch.nn.functional.silu(gate) * up,
        shapes=[(1, 14336), (4096, 2880), (4096, 11008), (8192, 14336)],
        inputs=lambda random, shape: (random(shape), random(shape)),
        forward=ADD,
        backward=tensors(3, 2),
        peers={"Liger": attrgetter("liger_swiglu")},
    ),
]
