"""Workloads of low_precision/quantize: float8 with a scale for the tensor, each row, group or block; MX and NVFP4."""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Amount, Bytes, Function, Workload, drawn_rows

BLOCKS = {"per tensor": (-1, -1), "per row": (1, -1), "groups of 1 x 128": (1, 128), "blocks of 128 x 128": (128, 128)}
MODELS = [(4096, size) for size in (768, 2880, 7168, 12288)]
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the eight codes without a sign stand for
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # of neighbours


def drawn(seed: int, least_unit: int = 1) -> list[tuple[int, int]]:
    """Return sizes of activations that no model has.

    In one, 128 divides a row; in one, 8 does, and 16 does not; in one, `least_unit` does.
    """
    units = ((128, 0), (16, 8), (least_unit, 0))
    return [
        drawn_rows(len(units) * seed + place, (2048, 65536), (512, 16384), 2**26, *unit)
        for place, unit in enumerate(units)
    ]


def in_torch(block_size: tuple[int, int]) -> Callable[[Any], Function]:
    """Return what makes PyTorch's function, given the module `torch`."""

    def made(torch: Any) -> Function:
        def quantize(x: Any) -> tuple[Any, Any]:
            rows, columns = (size if block == -1 else block for block, size in zip(block_size, x.shape, strict=True))
            padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).float()
            blocks = padded.view(padded.shape[0] // rows, rows, -1, columns)
            scales = blocks.abs().amax((1, 3)) / 448
            values = (blocks * (1 / scales)[:, None, :, None]).to(torch.float8_e4m3fn)
            return values.view(padded.shape)[: x.shape[0], : x.shape[1]], scales

        return quantize

    return made


def blocks_of(x: Any, size: int) -> tuple[Any, Any]:
    """Return the blocks of rows, the last one padded, and their largest magnitudes."""
    import torch

    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).float().view(len(x), -1, size)
    return blocks, blocks.abs().amax(-1)


def values_of(blocks: Any, inverse: Any, columns: int, bits: int) -> Any:
    """Return blocks times one over their scales, as float8 or as codes of 4 bits, two in a byte."""
    import torch

    y = (blocks * inverse[..., None]).flatten(1)[:, :columns]
    if bits == 8:
        return y.clamp(-448, 448).to(torch.float8_e4m3fn)
    size, codes = y.abs(), (y < 0).byte() << 3
    # A number in the middle of two codes gets the even one.
    for place, middle in enumerate(MIDDLES):
        codes = codes + (size >= middle if place % 2 else size > middle)
    return codes[:, ::2] | codes[:, 1::2] << 4


def mx(bits: int, torch: Any) -> Function:
    """Return PyTorch's function of MX."""

    def quantize(x: Any, _: Any) -> tuple[Any, Any]:
        blocks, largest = blocks_of(x, 32)
        exponent = (largest.view(torch.int32) >> 23) - (8 if bits == 8 else 2)  # less that of 448 or 6
        exponent = exponent.clamp(min=0)
        inverse = ((254 - exponent) << 23).view(torch.float32)
        return values_of(blocks, inverse, x.shape[1], bits), exponent.to(torch.uint8)

    return quantize


def nvfp4(torch: Any) -> Function:
    """Return PyTorch's function of NVFP4, with a scale of the tensor that is known."""

    def quantize(x: Any, tensor: Any) -> tuple[Any, Any, Any]:
        blocks, largest = blocks_of(x, 16)
        scales = (largest / 6 / tensor).clamp(max=448).to(torch.float8_e4m3fn)
        inverse = 1 / (scales.float() * tensor)
        return values_of(blocks, inverse, x.shape[1], 4), scales, tensor

    return quantize


def of_op(block_size: tuple[int, int], op: ModuleType) -> Function:
    """Return our function, given the op's module."""
    return partial(op.quantize, block_size=block_size)


def of_mx(dtype: str, op: ModuleType) -> Function:
    """Return our function of MX, given the op's module."""
    import torch

    return lambda x, _: op.quantize_mx(x, getattr(torch, dtype))


def floor(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: numbers of 16 bits are read, and of 8 are written."""
    return floor_of(8, math.inf, shape, itemsize)


def floor_of(bits: int, block: float, shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: numbers of 16 bits are read, those of `bits` and a byte for each block are written."""
    size = math.prod(shape)
    return Bytes(itemsize * size, size * bits / 8 + size / block)


def given(random: Function, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return numbers, and the scale of NVFP4 that makes the largest of them 448 * 6."""
    x = random(shape).detach()
    return x, x.abs().max().float() / 2688


def close(output: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results as floats to compare."""
    return output.reshape(-1).float(), ours.reshape(-1).float()


def close_bits(output: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results as floats: of two codes in a byte what they stand for, of a power of two its exponent."""
    import torch

    if ours.dtype == torch.float4_e2m1fn_x2:
        table = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)], device=ours.device)
        both = (codes.view(torch.uint8).reshape(-1).int() for codes in (output, ours))
        output, ours = (table[torch.stack([codes & 15, codes >> 4])] for codes in both)
    elif ours.dtype == torch.float8_e8m0fnu:
        output, ours = (powers.view(torch.uint8) for powers in (output, ours))
    return close(output, ours)


NARROW: list[tuple[str, Callable[[ModuleType], Function], Callable[[Any], Function], Amount]] = [
    ("MXFP8", partial(of_mx, "float8_e4m3fn"), partial(mx, 8), partial(floor_of, 8, 32)),
    ("MXFP4", partial(of_mx, "float4_e2m1fn_x2"), partial(mx, 4), partial(floor_of, 4, 32)),
    ("NVFP4", lambda op: op.quantize_nvfp4, nvfp4, partial(floor_of, 4, 16)),
]
WORKLOADS = [
    *(
        Workload(
            "low_precision/quantize",
            variant=variant,
            ours=partial(of_op, block_size),
            torch=in_torch(block_size),
            shapes=[*MODELS, *drawn(seed)],
            inputs=lambda random, shape: (random(shape).detach(),),
            forward=floor,
            backward=None,
            alike=close,
        )
        for seed, (variant, block_size) in enumerate(BLOCKS.items())
    ),
    *(
        Workload(
            "low_precision/quantize",
            variant=variant,
            ours=ours,
            torch=torch,
            shapes=[*MODELS, *drawn(seed, 2)],
            inputs=given,
            forward=amount,
            backward=None,
            alike=close_bits,
        )
        for seed, (variant, ours, torch, amount) in enumerate(NARROW, len(BLOCKS))
    ),
]
