"""Workloads of low_precision/fused_quantize: RMSNorm and SwiGLU to float8, with a scale for each row or group."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks.quantize import drawn
from triton_gallery.libraries.workload import Bytes, Function, Workload, hidden

BLOCKS = {"per row": (1, -1), "groups of 1 x 128": (1, 128)}
GATED = [(128, 14336), (4096, 2880), (4096, 7168), (4096, 11008), (8192, 14336)]
EPS = 1e-6


def quantized(torch: Any, y: Any, block_size: tuple[int, int]) -> tuple[Any, Any]:
    """Return float8 and scales, as torch.compile fuses them best: in groups, without a gap or padded."""
    columns = y.shape[1] if block_size[1] == -1 else block_size[1]
    padded = torch.nn.functional.pad(y, (0, -y.shape[1] % columns)).float()
    groups = padded.view(y.shape[0], -1, columns)
    scales = groups.abs().amax(-1) / 448
    values = (groups * (1 / scales)[..., None]).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:, : y.shape[1]], scales


def norm(block_size: tuple[int, int]) -> Callable[[Any], Function]:
    """Return what makes PyTorch's function, given the module `torch`."""

    def made(torch: Any) -> Function:
        def function(x: Any, weight: Any, eps: float) -> tuple[Any, Any]:
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
            return quantized(torch, y, block_size)

        return function

    return made


def norm_residual(block_size: tuple[int, int]) -> Callable[[Any], Function]:
    """Return what makes PyTorch's function, given the module `torch`."""

    def made(torch: Any) -> Function:
        def function(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any, Any]:
            h = x + residual
            y = torch.nn.functional.rms_norm(h, x.shape[-1:], weight, eps)
            return (*quantized(torch, y, block_size), h)

        return function

    return made


def swiglu(block_size: tuple[int, int]) -> Callable[[Any], Function]:
    """Return what makes PyTorch's function of a whole projection, given the module `torch`."""

    def made(torch: Any) -> Function:
        def function(x: Any) -> tuple[Any, Any]:
            gate, up = x.chunk(2, -1)
            return quantized(torch, torch.nn.functional.silu(gate) * up, block_size)

        return function

    return made


def of_norm(name: str, block_size: tuple[int, int], op: ModuleType) -> Function:
    """Return our function, given the op's module."""
    return partial(getattr(op, name), block_size=block_size)


def of_swiglu(block_size: tuple[int, int], op: ModuleType) -> Function:
    """Return our function, given the op's module."""
    return partial(op.fused_quantize_swiglu, up=None, block_size=block_size)


def floor(reads: int, writes: int, shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: so many numbers of 16 bits for each one of 8 that is written."""
    size = shape[0] * shape[1]
    return Bytes(reads * itemsize * size, writes * itemsize * size + size)


def close(output: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results as floats to compare.

    Torch does not round to 16 bits between operators that it fuses: a value may be the next float8 number.
    """
    return output.reshape(-1).float(), ours.reshape(-1).float()


WORKLOADS = [
    *(
        Workload(
            "low_precision/fused_quantize",
            variant=f"RMSNorm, {variant}",
            ours=partial(of_norm, "fused_quantize_rms_norm", block_size),
            torch=norm(block_size),
            shapes=hidden(*drawn(seed)),
            inputs=lambda random, shape: (random(shape).detach(), random(shape[-1:]).detach()),
            constants=(EPS,),
            forward=partial(floor, 1, 0),
            backward=None,
            alike=close,
        )
        for seed, (variant, block_size) in enumerate(BLOCKS.items())
    ),
    *(
        Workload(
            "low_precision/fused_quantize",
            variant=f"RMSNorm of a sum, {variant}",
            ours=partial(of_norm, "fused_quantize_rms_norm_residual", block_size),
            torch=norm_residual(block_size),
            shapes=[(4096, 2880), (4096, 4096), (4096, 7168), (4096, 16384), *drawn(seed)],
            inputs=lambda random, shape: (*(random(shape).detach() for _ in range(2)), random(shape[-1:]).detach()),
            constants=(EPS,),
            forward=partial(floor, 2, 1),
            backward=None,
            alike=close,
        )
        for seed, (variant, block_size) in enumerate(BLOCKS.items(), 2)
    ),
    *(
        Workload(
            "low_precision/fused_quantize",
            variant=f"SwiGLU, {variant}",
            ours=partial(of_swiglu, block_size),
            torch=swiglu(block_size),
            shapes=[*GATED, *drawn(seed)],
            inputs=lambda random, shape: (random((shape[0], 2 * shape[1])).detach(),),
            forward=partial(floor, 2, 0),
            backward=None,
            alike=close,
        )
        for seed, (variant, block_size) in enumerate(BLOCKS.items(), 4)
    ),
]
