"""The works of fusion/softmax beside other libraries."""

from operator import attrgetter

from work import Work

WORKS = [
    Work(
        "fusion/softmax",
        ours=attrgetter("softmax"),
        torch=lambda torch: lambda x: torch.softmax(x, -1),
        shapes=[
            *((4096, size) for size in (197, 768, 2048, 2880, 4096, 7168, 16384, 32000, 50257)),
            *((1, 128256), (64, 151936), (32768, 4096)),
        ],
        inputs=lambda random, shape: (random(shape),),
        peers={"Liger": attrgetter("liger_softmax")},
    ),
]
