"""The works of fusion/rms_norm beside other libraries."""

from operator import attrgetter

from work import Work, hidden

WORKS = [
    Work(
        "fusion/rms_norm",
        ours=attrgetter("rms_norm"),
        torch=lambda torch: lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
        shapes=hidden((1, 4096), (64, 7168), (32768, 4096)),
        inputs=lambda random, shape: (random(shape), random(shape[-1:])),
        constants=(1e-6,),
        peers={"Liger": attrgetter("liger_rms_norm")},
    ),
]
