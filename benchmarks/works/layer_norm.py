"""The works of fusion/layer_norm beside other libraries."""

from operator import attrgetter

from work import Work, hidden

WORKS = [
    Work(
        "fusion/layer_norm",
        ours=attrgetter("layer_norm"),
        torch=lambda torch: lambda x, *args: torch.nn.functional.layer_norm(x, x.shape[-1:], *args),
        shapes=hidden((1, 4096), (64, 7168), (32768, 4096)),
        inputs=lambda random, shape: (random(shape), random(shape[-1:]), random(shape[-1:])),
        constants=(1e-6,),
        peers={"Liger": attrgetter("liger_layer_norm")},
    ),
]
