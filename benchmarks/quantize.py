"""Workloads of low_precision/quantize: float8 with a scale for the tensor, each row, group or block."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Workload, hidden

BLOCKS = {"per tensor": (-1, -1), "per row": (1, -1), "groups of 1 x 128": (1, 128), "blocks of 128 x 128": (128, 128)}
# Of models, and three whose sides 128 does not divide
SHAPES = [*hidden(), (500, 5000), (1031, 11008), (16384, 1792)]


def in_torch(block_size: tuple[int, int]) -> Callable[[Any], Callable[..., Any]]:
    """Return what makes PyTorch's function, given the module `torch`."""

    def made(torch: Any) -> Callable[..., Any]:
        def quantize(x: Any) -> tuple[Any, Any]:
            rows, columns = (size if block == -1 else block for block, size in zip(block_size, x.shape, strict=True))
            padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).float()
            blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
            scales = blocks.abs().amax((1, 3)) / 448
            values = (blocks * (1 / scales)[:, None, :, None]).to(torch.float8_e4m3fn)
            return values.view(padded.shape)[: x.shape[0], : x.shape[1]], scales

        return quantize

    return made


def of_op(block_size: tuple[int, int], op: ModuleType) -> Callable[..., Any]:
    """Return our function, given the op's module."""
    return partial(op.quantize, block_size=block_size)


def floor(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: numbers of 16 bits are read, and of 8 are written."""
    size = shape[0] * shape[1]
    return Bytes(itemsize * size, size)


WORKLOADS = [
    Workload(
        "low_precision/quantize",
        variant=variant,
        ours=partial(of_op, block_size),
        torch=in_torch(block_size),
        shapes=SHAPES,
        inputs=lambda random, shape: (random(shape).detach(),),
        forward=floor,
        backward=None,
        alike=lambda output, ours: (output.reshape(-1).float(), ours.reshape(-1).float()),
    )
    for variant, block_size in BLOCKS.items()
]
